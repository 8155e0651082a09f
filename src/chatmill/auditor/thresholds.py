"""Every tuned number of the audit, with the case it exists for; clean sets and seeded faults in tests/audit hold it."""

MOST_FULL = 0.5
"""If everything is trained in more than this share of documents, that is how the set was made, also where turns are
not known. In fewer, such documents may be the ends of long answers that were cut into rows."""

FARTHEST_SHIFT = 16
"""A mask of the size of its answer that begins within so many tokens of it is shifted; farther, it is another fault.
A prompt's own tokens, the usual distance, are fewer in all templates of the tests."""

ENDING = 12
"""Answers that end in the same tokens, this many, count as one: a row for each turn repeats earlier answers."""

MOST_AFTER_STOP = 3
"""Tokens of text that templates write between a stop and what ends the document, at most; more text before another stop
means that the first stop was spelled by the answer."""

MOST_BEGIN = 2
"""Tokens that templates write before the first message, at most: a shorter document may be a cut beginning."""

COMMON = 8
"""Pieces in more records than this are the template's, or a phrase of the data, and recognise nothing."""

WHOLE_RECORD = 0.7
"""A document holds a record if it has this share of the pieces that only the record has, and more than `FEW_PIECES`: a
cut or edited record has fewer."""
FEW_PIECES = 3

NEARLY_FULL, MOST_ROWS, FEW_ROWS = 0.95, 0.9, 8
"""Rows are perhaps packed if this share of the longest is filled in this share of them, and there are not few."""

THINK_CLOSE = 2
"""Tokens between the end of the reasoning and the first target that still are the white space between both."""
