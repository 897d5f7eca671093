"""What the commands of the command line do, where it is not to run a service."""
