"""Makers of files of agents, each with the agent's own writer; `tests/data/agents` holds what they make."""
