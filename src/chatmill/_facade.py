"""The table of public names: where each is defined; read by the package's lazy `__getattr__`."""

PUBLIC: dict[str, str] = {
    # errors
    "ChatmillError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "FormatError": "errors",
    "MissingExtraError": "errors",
    "RecordError": "errors",
    "TokenizerError": "errors",
    "UnknownNameError": "errors",
    # conversations and tokens
    "Conversation": "core.conversation",
    "Message": "core.conversation",
    "Role": "core.conversation",
    "ToolCall": "core.conversation",
    "Tokens": "core.tokens",
    "Part": "core.kinds",
    "RoleCode": "core.kinds",
    "IGNORE_INDEX": "core.shift",
    # reading
    "ConversationFile": "read.conversations",
    "read_conversations": "read.conversations",
    "read_transcripts": "read.transcripts",
    # tokenizers
    "Tokenizer": "tokenizer.protocol",
    "added_tokens": "tokenizer.load",
    "load_tokenizer": "tokenizer.load",
    "with_control_tokens": "tokenizer.load",
    # rendering and labels
    "Policy": "label.policy",
    "Rendered": "render.render",
    "Template": "render.template",
    "find_policy": "label.presets",
    "find_template": "render.registry",
    "render_conversations": "render.render:render",
    # spec 1: the token-native SFT format
    "ChatExample": "systems.token_native_sft",
    "ChatMsg": "systems.token_native_sft",
    "DEFAULT_SYSTEM_TEXT": "systems.token_native_sft",
    "collate_sft_batch": "systems.token_native_sft",
    "pack_sft_ids_and_mask": "systems.token_native_sft",
    "serialize_chat_to_ids": "systems.token_native_sft",
    "sft_loss_mask_for_ids": "systems.token_native_sft",
    # spec 2: the post-training stream
    "PackedStream": "pack.stream",
    "StreamReport": "pack.stream",
    "conversation_to_transcript": "systems.post_training",
    "encode_transcripts": "systems.post_training",
    "pack_post_training_stream": "pack.stream",
    "pack_transcripts": "systems.post_training",
    "post_training_loss_mask": "pack.stream",
    "post_training_targets": "pack.stream",
}
"""Public name -> module below `chatmill`, with `:attribute` where it has another name there."""
