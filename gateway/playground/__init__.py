"""Serve the page at ``/``.

It has chats and completions in a browser, and the operator's view. See docs/playground.md.
"""
