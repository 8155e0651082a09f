/* Documents laid out after their plans (document_layout.py). */

/* Origin in document_layout.py: up to the first texts are contents and reasoning, from the second on those of calls, from the
   third on they are in no column; and the owner of items that are no message's. */
enum { LAST_COUNTED = 2, FIRST_OF_CALLS = 8, WITHOUT_COLUMN = 11, NOBODY = -(1 << 30) };

/* A column of texts that documents may show: all of them lie in one buffer. */
typedef struct {
    const int64_t *starts, *lengths; /* NULL where no plan shows it */
    int64_t buffer;
} shown_column;

/* An item, as in document_layout.py. */
typedef struct {
    int64_t start, size;
    int32_t owner, message, call, operations, expression;
    uint8_t kind, origin, is_ids, opens;
    int32_t form;
} item;

/* The items of all plans. */
typedef struct {
    const int64_t *firsts; /* one more than there are plans */
    const item *items;
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

static inline int begins_piece(const item *one) { return one->is_ids || one->opens; }

/* Find what each row begins with like the one before it of the same conversation; rows part where no piece of text goes on.
 *
 * `path` has room for the items of the longest row, `others` for all items. Returns how many of these there are, or -1
 * where a number lies outside its array. Of each stretch, so many items are to be skipped; of each row there is the one
 * that it goes on from, -1 for none, and the run of that one before which it leaves it. */
EXPORT int64_t chatmill_share(const item_table *t, const int64_t *stretches, const int64_t *bases, const int64_t *first_stretches,
                              const int64_t *conversations, int64_t rows, path_item *path, int64_t *skips, int64_t *parents,
                              int64_t *until, other_kind *others)
{
    const item *const items = t->items;
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
                if (begins_piece(&items[line]) && begins_piece(&items[other])) shared = at;
                goes_on = at < known && path[at].base == bases[s] && items[line].form == items[other].form;
                at += goes_on;
            }
        }
        if (goes_on && (at == known || begins_piece(&items[path[at].line]))) shared = at;
        parents[row] = shared ? path[shared - 1].row : -1;
        until[row] = shared ? path[shared - 1].run + 1 : 0;
        at = 0;
        for (int64_t s = begin; s < end; s++) {
            if (stretches[s] < 0 || stretches[s] >= t->plans) return -1;
            const int64_t line = t->firsts[stretches[s]], size = t->firsts[stretches[s] + 1] - line;
            skips[s] = shared - at < 0 ? 0 : shared - at < size ? shared - at : size;
            for (int64_t i = 0; i < size; i++, at++) {
                const uint8_t kind = items[line + i].kind;
                if (at >= shared) {
                    path[at] = (path_item){line + i, bases[s], run++, row, kind};
                    continue;
                }
                path[at].line = line + i;
                if (kind != path[at].kind) others[count++] = (other_kind){row, path[at].run, kind};
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
    int64_t at = 0, text = 0, others = 0;
    for (int64_t s = 0; s < stretch_count; s++) {
        const int64_t plan = stretches[s], conversation = conversations[s], base = bases[s];
        if (plan < 0 || plan >= table->plans || conversation < 0 || conversation >= conversation_count) return -1;
        const int64_t first_message = message_offsets[conversation];
        const int64_t message_count = message_offsets[conversation + 1] - first_message;
        if (skips[s] < 0) return -1;
        for (int64_t line = table->firsts[plan] + skips[s]; line < table->firsts[plan + 1]; line++, at++) {
            const item one = table->items[line];
            out->kinds[at] = one.kind;
            out->owners[at] = one.owner == NOBODY ? -1 : (int32_t)(one.owner + base);
            out->is_text[at] = !one.is_ids;
            int64_t start = one.start, size = one.size;
            if (one.is_ids) {
                out->starts[at] = start;
                out->sizes[at] = size;
                continue;
            }
            const int origin = one.origin;
            out->which[text] = 0; /* the buffer of fixed texts */
            if (origin > 0 && origin < WITHOUT_COLUMN) {
                const shown_column column = columns[origin];
                const int64_t message = one.message + base;
                if (!column.starts || message < 0 || message >= message_count) return -1;
                int64_t place = first_message + message;
                if (origin >= FIRST_OF_CALLS) {
                    const int64_t call = one.call;
                    if (call < 0 || call >= call_offsets[place + 1] - call_offsets[place]) return -1;
                    place = call_offsets[place] + call;
                }
                if (origin <= LAST_COUNTED && !one.operations) out->whole[2 * place + origin - 1] = 1;
                start = column.starts[place];
                size = column.lengths[place];
                out->which[text] = (uint8_t)column.buffer;
            }
            if (origin >= WITHOUT_COLUMN || one.operations) {
                out->others[others] = text;
                out->lines[others] = line;
                out->bases[others] = base;
                out->conversations[others++] = conversation;
            }
            out->text_starts[text] = start;
            out->text_sizes[text] = size;
            out->opens[text] = one.opens;
            out->text_items[text++] = at;
        }
    }
    out->texts = text;
    out->other_count = others;
    return at;
}
