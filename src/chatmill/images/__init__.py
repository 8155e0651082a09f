"""Pictures: how many tokens one takes, from the size in its header and the numbers of the model's processor.

rule.py       what a family of processors writes for a picture; one file each in families/
find_rule.py  the rule of a model folder
headers.py    the size of a picture from its first bytes
files.py      opens what records name, inside the folder that the user named
expand.py     one placeholder of a document becomes the tokens of its picture
column.py     the pictures of a document, as they are stored
"""
