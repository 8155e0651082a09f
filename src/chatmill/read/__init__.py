"""Files of any kind to conversations: places, formats, shapes and field maps.

    place --files--> raw records --shapes--> Conversation, or a RecordError with place, field and reason

`columns` and `rows` do the same in columns, and leave every record that they are not sure of to `files` and `shapes`.
"""
