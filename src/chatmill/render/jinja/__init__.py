"""Chat templates in Jinja: run on strings that remember their origin, so that every character's part is known.

sandbox, tracing_sandbox   run a template, on plain values and on traced ones (traced, traced_values, markup)
renderer -> Rendering      the text of some messages, cut by origin; kept for records with the same messages and fields
                           (their *shape*), for which everything that the template asks comes out the same
turns -> Answer            where the answer of a message begins and ends, or why it cannot be proved
turn_sequences, labels     which turns share a sequence, and what every character of it is (`TextSequence`)
message_sequences          sequences of new shapes, put together from messages of others
probes, names, options     what a template wants, what it reads, and what a recipe says about it
"""
