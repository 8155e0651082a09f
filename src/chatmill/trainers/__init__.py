"""Training from a dataset inside a trainer, with one import and no export.

    dataset or recipe --source--> folder --rows--> rows --the trainer's own loader--> batch

Each module is for one trainer, has its name, and imports that trainer. The rows are read from the files of the
dataset when they are asked for.
"""
