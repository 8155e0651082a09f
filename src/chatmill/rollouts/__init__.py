"""Rollouts: prompts, stops, parsed answers and next prompts, derived from a chat template.

    messages -> Prompt -> (a server samples) -> Answer, with proof -> Extension -> ... -> Rollout -> records

`types.py` holds the values, `renderer.py` the way in. `template.py` is the one file that asks `chatmill.render`.
"""
