"""Conversations to tokens: the chat template decides the text, and every token knows its role and part.

registry --bind--> ModelTemplate (Jinja) or Template (Python) --render--> Tokens (ids, and runs of kinds)
"""
