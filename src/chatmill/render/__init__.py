"""Conversations to tokens: the chat template decides the text, and every token knows its role and part.

registry --bind--> BoundTemplate --render--> Tokens (ids, and runs of kinds)
"""
