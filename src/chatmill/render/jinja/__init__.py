"""Chat templates in Jinja: run on strings that remember their origin, so that every character's part is known.

renderer -> outputs        P(i), A(i) and F as lists of segments: what one turn of a loop over messages writes
turn, turn_run, replay     what turns asked and wrote, remembered; known ones are found without Jinja
tracing_sandbox, sandbox   run a template, on traced values (traced, traced_values, views, positions) and on plain ones
paths                      the same as where each leaves F, so that they are compared at once
rules, answers -> Answer   where the answer of a message begins and ends, or why it cannot be proved (answer_cache)
labels, label_table        what every character of a segment is
probes, names, options     what a template wants, what it reads, and what a recipe says about it
"""
