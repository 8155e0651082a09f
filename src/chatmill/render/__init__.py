"""Conversations to tokens: the chat template decides the text, and every token knows its role and part.

registry.bind --> ModelTemplate
render.render --> Tokens (ids, and runs of kinds):
    plans        the plan of every record: found by its key, a few bytes (record_keys), or made (model_template):
                 its answers (jinja.answers), its documents (documents), and what their fragments become (fragment_walk)
    plan_store   all that is remembered of a template, with one limit
    fill         texts of documents are gathered from the columns, encoded in one call, and laid out between fixed ids
"""
