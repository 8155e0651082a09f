"""The token-native SFT format, one example at a time: chat to ids, mask, truncation and padding, tensors.

The bulk path is `render(conversations, "token_native", tokenizer)` with the policy `assistant`; both give the same ids
and the same mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from chatmill.core.conversation import Message, Role
from chatmill.core.kinds import RoleCode
from chatmill.core.message_parser import parse_messages
from chatmill.core.shift import IGNORE_INDEX, inputs_and_targets, next_token
from chatmill.errors import DataError, RecordError, need
from chatmill.load.placement import named_device
from chatmill.pack.turns import Outline, Step
from chatmill.pack.windows import newest_turns
from chatmill.tokenizer.foreign import AnyTokenizer

if TYPE_CHECKING:
    import torch

DEFAULT_SYSTEM_TEXT = "you are a helpful assistant."
SYS, USR, ASST, EOT = (f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in ("sys", "usr", "asst", "eot"))
MARKERS = {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}
_OPENING = {Role.SYSTEM: "sys", Role.USER: "usr", Role.ASSISTANT: "asst"}


class ChatMsg(TypedDict):
    """One message; the role is matched without case."""

    role: Literal["system", "user", "assistant"]
    content: str


class _ExampleId(TypedDict, total=False):
    id: str


class ChatExample(_ExampleId):
    """One chat; the optional `id` names it in errors."""

    messages: list[ChatMsg]


def sft_token_ids(tokenizer: Any) -> dict[str, int]:
    """Return the four control ids under the names that the functions take: `sys_id`, `usr_id`, `asst_id`, `eot_id`.

    A tokenizer that lacks one is an error; `load_tokenizer(..., control_tokens=[...])` adds them.
    """
    return {f"{key}_id": token_id for key, token_id in AnyTokenizer(tokenizer).marker_ids(MARKERS).items()}


def serialize_chat_to_ids(ex: ChatExample, *, tokenizer: Any, default_system_text: str) -> list[int]:
    """Ids of one chat: `[role id] + encode(content) + [eot]` per message, the system message first and always.

    `tokenizer` is a Chatmill, `tokenizers` or transformers tokenizer, or any object with `encode(str)` and a way to
    find the four control ids. Content never becomes a control id: a foreign tokenizer that would do so is an error.
    """
    encoder = AnyTokenizer(tokenizer)
    marker = encoder.marker_ids(MARKERS)
    try:
        messages = parse_messages(ex.get("messages"))
        for index, message in enumerate(messages):
            _check(message, index)
        added = int(messages[0].role is not Role.SYSTEM)
        messages = (Message(Role.SYSTEM, default_system_text),) * added + messages
        ids, offsets = encoder.encode([message.content for message in messages])
        forged = encoder.first_control(ids, offsets, MARKERS)
        if forged is not None:
            index = forged[0] - added
            raise RecordError(
                forged[1],
                code="control_token",
                path="default_system_text" if index < 0 else f"messages[{index}].content",
            )
    except RecordError as error:
        error.record_id = "" if ex.get("id") is None else str(ex["id"])
        raise
    out: list[int] = []
    for message, (start, end) in zip(messages, pairwise(offsets.tolist()), strict=True):
        out += [marker[_OPENING[message.role]], *ids[start:end].tolist(), marker["eot"]]
    return out


def _check(message: Message, index: int) -> None:
    """Refuse what the format cannot write, as the template `token_native` does, and weights, which ids do not hold."""
    channels = message.channel or message.recipient or message.content_type
    refusals = (
        (message.role not in _OPENING, "role_not_in_template", ".role", f"has no role {message.role.value!r}"),
        (index > 0 and message.role is Role.SYSTEM, "late_system", ".role", "takes a system message as the first only"),
        (message.tool_calls, "tool_calls_not_in_template", ".tool_calls", "cannot write tool calls"),
        (message.structured, "structured_not_in_template", ".content", "cannot write Harmony contents"),
        (message.parts, "non_text_part", ".content", "cannot write pictures"),
        (channels, "channel_not_in_template", "", "has no channels or recipients"),
        (message.weight not in (None, 1), "bad_weight", "", "has no weights; a build with token_native has them"),
    )
    for is_refused, code, field, said in refusals:
        if is_refused:
            raise RecordError(f"the token-native format {said}", code=code, path=f"messages[{index}]{field}")


def sft_loss_mask_for_ids(ids: list[int], *, sys_id: int, usr_id: int, asst_id: int, eot_id: int) -> list[bool]:
    """Token-aligned mask by a scan: True after an assistant id up to and including the next eot.

    Role ids are always False; a system or user id also closes a span whose eot is missing, so that user text is never
    trained.
    """
    _check_roles(sys_id=sys_id, usr_id=usr_id, asst_id=asst_id, eot_id=eot_id)
    mask: list[bool] = []
    in_assistant = False
    for token in ids:
        if token in (sys_id, usr_id, asst_id):
            in_assistant = token == asst_id
            mask.append(False)
        else:
            mask.append(in_assistant)
            if token == eot_id:
                in_assistant = False
    return mask


def pack_sft_ids_and_mask(
    ids: list[int],
    mask: list[bool],
    *,
    S: int,
    sys_id: int,
    usr_id: int,
    asst_id: int,
    eot_id: int,
    pad_id: int,
) -> tuple[list[int], list[bool]]:
    """Ids and token-aligned mask of exactly `S` tokens: oldest turns dropped whole, then cut on the left, or padded.

    The final assistant turn's eot is always kept, and keeps its mask.
    """
    _check_roles(sys_id=sys_id, usr_id=usr_id, asst_id=asst_id, eot_id=eot_id)
    if len(ids) != len(mask):
        raise DataError(f"{len(ids)} ids and {len(mask)} mask values; there must be one mask value per id")
    if S < 2:
        raise DataError(f"S is {S}; a row needs at least 2 tokens, one to read and one to predict")
    roles = {sys_id: RoleCode.SYSTEM, usr_id: RoleCode.USER, asst_id: RoleCode.ASSISTANT}
    kept = newest_turns(_outline(ids, roles, eot_id), S)
    packed = [token for span in kept for token in ids[span.start : span.end]]
    packed_mask = [value for span in kept for value in mask[span.start : span.end]]
    padding = S - len(packed)
    return packed + [pad_id] * padding, packed_mask + [False] * padding


def _outline(ids: list[int], roles: Mapping[int, RoleCode], eot_id: int) -> Outline:
    """Turns from a role id to its eot, after a system turn at the very beginning; tokens outside of turns are a piece.

    Those are before the first role id, or between an eot and the next one.
    """
    messages: list[Step] = []
    role, start = RoleCode.NONE, 0

    def close(end: int) -> None:
        if start < end:
            messages.append(Step(role, start, content=start, answer=end, end=end))

    for index, token in enumerate(ids):
        if token in roles:
            close(index)
            role, start = roles[token], index
        elif token == eot_id and role is not RoleCode.NONE:
            close(index + 1)
            role, start = RoleCode.NONE, index + 1
    close(len(ids))
    head = messages.pop(0).end if messages and messages[0].role is RoleCode.SYSTEM else 0
    return Outline(head=head, tail=len(ids), length=len(ids), messages=tuple(messages))


def collate_sft_batch(
    packed: list[tuple[list[int], list[bool]]], *, T: int, device: str, ignore_index: int = IGNORE_INDEX
) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Tensors `x, y, loss_mask` of shape `(B, T)` from rows of `T + 1` tokens with token-aligned masks.

    `y` and `loss_mask` are label-aligned: position `t` is that of token `t + 1`. `y` is `ignore_index` where the mask
    is False.
    """
    need("torch", "collate_sft_batch", "torch")
    import torch

    if T < 1:
        raise DataError(f"T is {T}; a row predicts at least 1 token")
    if not packed:
        raise DataError("the batch is empty; collate at least one row")
    for row, (ids, mask) in enumerate(packed):
        if len(ids) != T + 1 or len(mask) != T + 1:
            raise DataError(
                f"row {row} has {len(ids)} ids and {len(mask)} mask values; with T = {T} each row has T + 1 = {T + 1}"
            )
    all_ids = torch.from_numpy(np.array([ids for ids, _ in packed], dtype=np.int64))
    all_masks = torch.from_numpy(np.array([mask for _, mask in packed], dtype=np.bool_))
    x, y = inputs_and_targets(all_ids, all_masks, ignore_index=ignore_index)
    loss_mask = next_token(all_masks)
    where = named_device(device)
    moved = [tensor.contiguous().to(where) for tensor in (x, y, loss_mask)]
    return moved[0], moved[1], moved[2]  # type: ignore[return-value]


def sft_batch(
    chats: Sequence[ChatExample],
    *,
    tokenizer: Any,
    T: int,
    device: str = "cpu",
    default_system_text: str = DEFAULT_SYSTEM_TEXT,
    pad_id: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Chats to tensors `x, y, loss_mask` of shape `(B, T)`: serialized, masked, truncated and padded (with eot)."""
    marker = sft_token_ids(tokenizer)
    pad = marker["eot_id"] if pad_id is None else pad_id
    packed = []
    for chat in chats:
        ids = serialize_chat_to_ids(chat, tokenizer=tokenizer, default_system_text=default_system_text)
        mask = sft_loss_mask_for_ids(ids, **marker)
        packed.append(pack_sft_ids_and_mask(ids, mask, S=T + 1, pad_id=pad, **marker))
    return collate_sft_batch(packed, T=T, device=device, ignore_index=ignore_index)


def _check_roles(**ids: int) -> None:
    """Check that no two of the control ids are the same: a scan could not tell them apart."""
    if len(set(ids.values())) < len(ids):
        listed = ", ".join(f"{name}={value}" for name, value in ids.items())
        raise DataError(f"the four control tokens need four different ids, but here some are equal: {listed}")
