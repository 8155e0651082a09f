"""The table of public names: where each is defined; read by the package's lazy `__getattr__`."""

PUBLIC: dict[str, str] = {
    # errors
    "ChatmillError": "errors",
    "RecordError": "errors",
    # conversations and tokens
    "Conversation": "core.conversation",
    "Message": "core.conversation",
    "Role": "core.conversation",
    "ToolCall": "core.conversation",
    "Tokens": "core.tokens",
    "IGNORE_INDEX": "core.shift",
    # reading
    "read_conversations": "read.conversations",
    "read_transcripts": "read.transcripts",
    # tokenizers
    "load_tokenizer": "tokenizer.load",
    "with_control_tokens": "tokenizer.load",
    # rendering and labels
    "Policy": "label.policy",
    "find_policy": "label.presets",
    "render_conversations": "render.render:render",
    # spec 1: the token-native SFT format
    "ChatExample": "systems.token_native_sft",
    "ChatMsg": "systems.token_native_sft",
    "DEFAULT_SYSTEM_TEXT": "systems.token_native_sft",
    "collate_sft_batch": "systems.token_native_sft",
    "pack_sft_ids_and_mask": "systems.token_native_sft",
    "serialize_chat_to_ids": "systems.token_native_sft",
    "sft_batch": "systems.token_native_sft",
    "sft_loss_mask_for_ids": "systems.token_native_sft",
    "sft_token_ids": "systems.token_native_sft",
    # spec 2: the post-training stream
    "PackedStream": "pack.stream",
    "conversation_to_transcript": "systems.post_training",
    "pack_post_training_stream": "pack.stream",
    "pack_transcripts": "systems.post_training",
    "post_training_loss_mask": "pack.stream",
    "post_training_targets": "pack.stream",
    # packing
    "plan": "pack.plan",
    # spec 3: explicit document boundaries
    "DataCollatorForCausalLM": "load.collate",
    "PictureCollator": "load.pictures",
    "block_tokenize_fn": "systems.document_boundaries",
    "get_pos_ids_for_packed_sequence": "load.collate",
    "trainer_columns": "load.row_columns",
    # spec 4: episodes and loaders
    "to_hf_dataset": "export.hf_rows",
    "EpisodeDataset": "store.episodes",
    "EpisodeWriter": "store.episode_writer",
    "GPTDataLoader": "load.token_stream",
    "GPTEpisodeDataLoader": "load.episodes",
    "load_training_config": "load.config",
    "make_loader": "load.token_stream",
    # a dataset as an object
    "compile": "dataset.compile",
    "Dataset": "dataset.stored",
    # builds
    "build": "compiler.run:run_build",
    "GateError": "compiler.gates",
    "Recipe": "compiler.recipe",
    "diff_datasets": "prove.compare.diff",
    "export_dataset": "export.export",
    "teacher_add": "distill.teacher",
    "teacher_request": "distill.teacher",
    "verify_dataset": "prove.verify:verify",
    # other pipelines
    "AuditCallback": "auditor.callback",
    "audit": "auditor.run",
    # spec 5: the Harmony distillation dataset
    "SynthKDDataset": "megatron",
    "build_synth_kd": "distill.run",
    "synth_kd_blend": "store.kd",
    "synth_kd_blends": "store.kd",
    "verify_synth_kd": "distill.check",
    "write_synth_harmony": "distill.synth_harmony",
    # losses
    "SpanLoss": "train.losses",
    "span_normalized_loss": "train.losses",
    "teacher_losses": "train.losses",
    # rollouts
    "ExtensionRefused": "rollouts.types",
    "Renderer": "rollouts.renderer",
    "Rollout": "rollouts.types",
    # proofs
    "check_isolation": "train.isolation",
}
"""Public name -> module below `chatmill`, with `:attribute` where it has another name there."""
