"""Recording proxy for model servers.

agent -> proxy -> model server
           |
           +----> calls.jsonl, one line per call -> read/agents/request_logs
"""
