"""What is trained: policies turn the kinds of tokens into weights."""
