"""Checks of this machine and of a model's files: one small
function each, given the facts that it judges.
"""
