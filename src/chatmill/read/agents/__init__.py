"""Read runs of agents as conversations.

A file is read as a whole and becomes records in OpenAI's form: one for each history that a model was really given,
in which every sampled answer is trained once.
"""
