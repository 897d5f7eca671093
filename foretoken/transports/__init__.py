"""How a step's requests and trees pass between a verifier and a drafter, and the memory that both map."""
