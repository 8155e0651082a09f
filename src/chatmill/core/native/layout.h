/* Documents laid out after their plans (document_layout.py). */

/* Origin in document_layout.py: up to the first texts are contents and reasoning, from the second on those of calls, from the
   third on they are in no column; and the owner of items that are no message's. */
enum { LAST_COUNTED = 2, FIRST_OF_CALLS = 8, WITHOUT_COLUMN = 11, NOBODY = -(1 << 30) };

/* A column of texts that documents may show: all of them lie in one buffer. */
typedef struct {
    const int64_t *starts, *lengths; /* NULL where no plan shows it */
    int64_t buffer;
} shown_column;

/* The items of all plans. */
typedef struct {
    const int64_t *firsts; /* one more than there are plans */
    const uint8_t *is_ids;
    const int64_t *starts, *sizes;
    const uint8_t *kinds;
    const int32_t *owners;
    const uint8_t *origins;
    const int32_t *messages, *calls, *operations;
    const uint8_t *opens;
    const int32_t *forms;
    int64_t plans;
} item_table;

/* An item of the row that was looked at last, and how it is laid out: as which run, of which row, and of what kind. */
typedef struct {
    int64_t line, base, run, row, kind;
} path_item;

/* The kind that a run has in a row which shares it. */
typedef struct {
    int64_t row, run, kind;
} other_kind;

/* Find what each row begins with like the one before it of the same conversation; rows part where no piece of text goes on.
 *
 * `path` has room for the items of the longest row, `others` for all items. Returns how many of these there are, or -1
 * where a number lies outside its array. Of each stretch, so many items are to be skipped; of each row there is the one
 * that it goes on from, -1 for none, and the run of that one before which it leaves it. */
EXPORT int64_t chatmill_share(const item_table *t, const int64_t *stretches, const int64_t *bases, const int64_t *first_stretches,
                              const int64_t *conversations, int64_t rows, path_item *path, int64_t *skips, int64_t *parents,
                              int64_t *until, other_kind *others)
{
    int64_t known = 0, run = 0, count = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t begin = first_stretches[row], end = first_stretches[row + 1];
        if (!row || conversations[row] != conversations[row - 1]) known = 0;
        int64_t at = 0, shared = 0;
        int goes_on = 1;
        for (int64_t s = begin; s < end && goes_on; s++) {
            if (stretches[s] < 0 || stretches[s] >= t->plans) return -1;
            for (int64_t line = t->firsts[stretches[s]]; line < t->firsts[stretches[s] + 1] && goes_on; line++) {
                const int64_t other = at < known ? path[at].line : line;
                if ((t->is_ids[line] || t->opens[line]) && (t->is_ids[other] || t->opens[other])) shared = at;
                goes_on = at < known && path[at].base == bases[s] && t->forms[line] == t->forms[other];
                at += goes_on;
            }
        }
        if (goes_on && (at == known || t->is_ids[path[at].line] || t->opens[path[at].line])) shared = at;
        parents[row] = shared ? path[shared - 1].row : -1;
        until[row] = shared ? path[shared - 1].run + 1 : 0;
        at = 0;
        for (int64_t s = begin; s < end; s++) {
            if (stretches[s] < 0 || stretches[s] >= t->plans) return -1;
            const int64_t line = t->firsts[stretches[s]], items = t->firsts[stretches[s] + 1] - line;
            skips[s] = shared - at < 0 ? 0 : shared - at < items ? shared - at : items;
            for (int64_t i = 0; i < items; i++, at++) {
                if (at >= shared) {
                    path[at] = (path_item){line + i, bases[s], run++, row, t->kinds[line + i]};
                    continue;
                }
                path[at].line = line + i;
                if (t->kinds[line + i] != path[at].kind) others[count++] = (other_kind){row, path[at].run, t->kinds[line + i]};
            }
        }
        known = at;
    }
    return count;
}

/* What `document_layout.py` hands over, with room for all items. */
typedef struct {
    int64_t *starts, *sizes; /* of ids; those of texts are left to the caller */
    uint8_t *kinds, *is_text;
    int32_t *owners;
    int64_t *text_items;
    uint8_t *which;
    int64_t *text_starts, *text_sizes;
    uint8_t *opens;
    int64_t *others; /* the texts that are in no column, or that operations are applied to: */
    int64_t *lines, *conversations, *bases; /* their places in the table, their conversations, and what they count from */
    uint8_t *whole; /* for each message whether its content and its reasoning are shown as they are */
    int64_t texts, other_count;
} laid_out;

/* The items of some stretches, each of which has a plan, a conversation, the message that its own messages count from, and
 * a number of items that are skipped. Returns how many items there are, or -1 where a number lies outside its array. */
EXPORT int64_t chatmill_lay_out(const item_table *table, const int64_t *stretches, const int64_t *conversations,
                                const int64_t *bases, const int64_t *skips, int64_t stretch_count, const int64_t *message_offsets,
                                int64_t conversation_count, const int64_t *call_offsets, const shown_column *columns,
                                laid_out *out)
{
    int64_t item = 0, text = 0, others = 0;
    for (int64_t s = 0; s < stretch_count; s++) {
        const int64_t plan = stretches[s], conversation = conversations[s], base = bases[s];
        if (plan < 0 || plan >= table->plans || conversation < 0 || conversation >= conversation_count) return -1;
        const int64_t first_message = message_offsets[conversation];
        const int64_t message_count = message_offsets[conversation + 1] - first_message;
        if (skips[s] < 0) return -1;
        for (int64_t line = table->firsts[plan] + skips[s]; line < table->firsts[plan + 1]; line++, item++) {
            out->kinds[item] = table->kinds[line];
            out->owners[item] = table->owners[line] == NOBODY ? -1 : table->owners[line] + (int32_t)base;
            out->is_text[item] = !table->is_ids[line];
            int64_t start = table->starts[line], size = table->sizes[line];
            if (table->is_ids[line]) {
                out->starts[item] = start;
                out->sizes[item] = size;
                continue;
            }
            const int origin = table->origins[line];
            out->which[text] = 0; /* the buffer of fixed texts */
            if (origin > 0 && origin < WITHOUT_COLUMN) {
                const shown_column column = columns[origin];
                const int64_t message = table->messages[line] + base;
                if (!column.starts || message < 0 || message >= message_count) return -1;
                int64_t at = first_message + message;
                if (origin >= FIRST_OF_CALLS) {
                    const int64_t call = table->calls[line];
                    if (call < 0 || call >= call_offsets[at + 1] - call_offsets[at]) return -1;
                    at = call_offsets[at] + call;
                }
                if (origin <= LAST_COUNTED && !table->operations[line]) out->whole[2 * at + origin - 1] = 1;
                start = column.starts[at];
                size = column.lengths[at];
                out->which[text] = (uint8_t)column.buffer;
            }
            if (origin >= WITHOUT_COLUMN || table->operations[line]) {
                out->others[others] = text;
                out->lines[others] = line;
                out->bases[others] = base;
                out->conversations[others++] = conversation;
            }
            out->text_starts[text] = start;
            out->text_sizes[text] = size;
            out->opens[text] = table->opens[line];
            out->text_items[text++] = item;
        }
    }
    out->texts = text;
    out->other_count = others;
    return item;
}
