"""The page at ``/``: chats and completions in a browser, and
the operator's view. docs/playground.md.
"""
