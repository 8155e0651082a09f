"""Checks token data that another pipeline made.

    files, datasets, batches --open--> TokenizedSet --layout--> what every token is --checks--> findings --> report

What a token is comes from the model's own template: from its literals (`literals`, `layout`), and with the source at
hand from a rendering of each record (`source`). What cannot be known is reported as unknown, never as a fault.
"""
