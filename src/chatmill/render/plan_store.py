"""All that is remembered of one template with one tokenizer: its turns and answers, labels, stretches and plans.

These refer to each other by numbers. So they have one limit, and are forgotten together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from chatmill.render.document_items import TokenRules
from chatmill.render.documents import RecordPlan
from chatmill.render.fragment_slots import FragmentSlots
from chatmill.render.fragment_walk import StepTable
from chatmill.render.jinja.record_view import Arguments, InputForm
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.record_keys import Key, RecordKeys

MAX_REMEMBERED = 600_000
"""Beyond, everything is forgotten before the next batch, and learned again."""
MAX_ENTRIES = 1 << 21
"""Entries of all plans together; beyond, plans are forgotten, which are quickly made again."""
ENTRIES_OF_KEY = 8
"""A key takes the room of so many."""
FIRST_RECORDS = 256
"""Keys are made for so few records at once as long as questions are new: each is asked of all that are left."""


class PlanStore:
    """What one process remembers."""

    def __init__(self, form: InputForm, rules: TokenRules) -> None:
        """Nothing is remembered."""
        self.lock, self.process = threading.Lock(), os.getpid()
        """Held while conversations are rendered: what is learned of them is not for two threads at once."""
        self._form, self._rules = form, rules
        self.unknown = 0
        """Records that had no plan."""
        self.is_in_doubt = False
        """Whether a fault came in between while something was learned."""
        self.forget()

    def forget(self) -> None:
        """Forget everything."""
        self.keys = RecordKeys(self._form)
        self.renderers: dict[str, TemplateRunner] = {}
        """By their options."""
        self.tables: dict[TemplateRunner, StepTable] = {}
        self.between: dict[TemplateRunner, str] = {}
        """What the template writes between reasoning and content."""
        self.slots = FragmentSlots(self._rules, arguments_are_text=self._form.arguments is Arguments.STRING)
        self.slice = FIRST_RECORDS
        """How many records keys are made for at once."""
        self._plans: dict[Key, RecordPlan] = {}
        self._version = self._entries = 0

    @property
    def plans(self) -> Mapping[Key, RecordPlan]:
        """The plans of all keys, as these are made now."""
        if self._version != self.keys.version:
            self._plans, self._version, self._entries = {}, self.keys.version, 0
        return self._plans

    def keep(self, key: Key, plan: RecordPlan) -> None:
        """Keep the plan of all records with a key, which is made as `plans` has it."""
        if self._entries > MAX_ENTRIES:
            self._plans, self._entries = {}, 0
        self._plans[key] = plan
        self._entries += len(plan.entries) + ENTRIES_OF_KEY

    @property
    def size(self) -> int:
        """How much is remembered, besides plans."""
        learned = sum(renderer.tries.size + len(renderer.answer_cache) for renderer in self.renderers.values())
        labelled = sum(table.size for table in self.tables.values())
        return self.keys.size + learned + labelled + self.slots.table.size

    def forget_if_full(self) -> None:
        """Forget everything where it is too much, or in doubt; numbers of what is forgotten must not be in use."""
        if self.is_in_doubt or self.size > MAX_REMEMBERED:
            self.is_in_doubt = False
            self.forget()
