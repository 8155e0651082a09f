"""A proxy in front of a model server that records every call: request, answer, and how the call ended.

agent -> proxy -> model server
           |
           +----> calls.jsonl, one line per call -> read/agents/request_logs
"""
