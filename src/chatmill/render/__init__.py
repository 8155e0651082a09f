"""Conversations to tokens: the chat template decides the text, and every token knows its role and part.

registry.bind --> ModelTemplate (Jinja) or Template (Python)
render.render --> Tokens (ids, and runs of kinds):
    plan_cache   the plan of every record: found by its key, a few bytes (record_keys); else the template runs for it,
                 and what it writes becomes a plan (model_template --> sequence_items --> sequence_table, record_plans)
    fill         texts of sequences are gathered from the columns, encoded in one call, and laid out between fixed ids
"""
