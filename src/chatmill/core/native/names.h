/* Names of keys and roles as data: what a shape calls the fields of its records and messages.
 *
 * A name is kept with the quote that ends it, so that no longer one is taken for it. It is compared as a word of eight
 * bytes first: most names are not longer.
 */

#define MAX_NAMES 32

enum { LIST = 1, ID, SOURCE, TOOLS, OPTIONS, EMPTY, CALLS, SYSTEM_TEXT, ANSWER, QUESTION, ONLY_NULL, REPEATED,
       SCORE = 16, /* and which one it is */
       OWN_CALL = 32, /* and what it means in a call */
       TURN = 64 /* and MAX_JOINED times its number, and which of its fields it is */ };
enum { ROLE = 1, CONTENT, REASONING, TOOL_CALLS, WEIGHT, TRAIN, NAME, TOOL_CALL_ID, RECIPIENT, CHANNEL, CONTENT_TYPE,
       ONE_CONTENT, FINISH_REASON, TOKEN_IDS, PROMPT_TOKEN_IDS, LOGPROBS, PASSED_FIELD, NULL_FIELD, EMPTY_FIELD };
enum { STRUCTURED = EMPTY_FIELD + 1 }; /* a field of `rare_text` that no key names */

/* What `scan.py` hands over: names one after another, of records, of messages, and of roles. */
typedef struct {
    int64_t counts[3];
    const uint8_t *text;
    const int64_t *lengths; /* with the quote */
    const uint8_t *meanings; /* one of the above; of a role its code (of turns that of each, in order) */
} shape_names;

struct name {
    uint64_t word, mask;
    place text;
    int64_t length;
    name *follower; /* the name that came after it last time */
    unsigned bit;   /* one of its own among those of its table */
    uint8_t meaning;
};

typedef struct {
    name names[MAX_NAMES];
    name start; /* is before the first one */
    int count;
} name_table;

struct shape {
    name_table of_record, of_message, of_role;
};

static int fill_table(name_table *table, const shape_names *given, int64_t first, int64_t count, place text)
{
    if (count < 1 || count > MAX_NAMES) return 0;
    table->start.follower = table->names;
    table->count = (int)count;
    for (int64_t i = 0; i < count; i++) {
        uint8_t head[8] = {0}, used[8] = {0};
        name *n = &table->names[i];
        n->text = text;
        n->length = given->lengths[first + i];
        n->meaning = given->meanings[first + i];
        n->follower = table->names;
        n->bit = 1u << i;
        const size_t bytes = n->length < 8 ? (size_t)n->length : 8;
        memcpy(head, text, bytes);
        memset(used, 0xFF, bytes);
        n->word = word_at(head);
        n->mask = word_at(used);
        text += n->length;
    }
    return 1;
}

/* Whether there are names, and not more than there is room for. */
static int fill_shape(shape *found, const shape_names *given)
{
    const int64_t records = given->counts[0], messages = given->counts[1], roles = given->counts[2];
    place text = given->text;
    if (!fill_table(&found->of_record, given, 0, records, text)) return 0;
    for (int64_t i = 0; i < records; i++) text += given->lengths[i];
    if (!fill_table(&found->of_message, given, records, messages, text)) return 0;
    for (int64_t i = 0; i < messages; i++) text += given->lengths[records + i];
    return fill_table(&found->of_role, given, records + messages, roles, text);
}

static inline int is_name(const name *n, place p, uint64_t word, ptrdiff_t left)
{
    if ((word ^ n->word) & n->mask) return 0;
    return n->length <= 8 || (left >= n->length && !memcmp(p + 8, n->text + 8, (size_t)n->length - 8));
}

/* The name at `p` (after an opening quote), or NULL where none of the table is there. `before` is the name before it,
 * and becomes the name itself: what followed that one last time is tried first, since records and messages mostly have
 * their keys in one order. */
static inline name *name_at(const scanner *s, place p, name_table *table, name **before)
{
    const ptrdiff_t left = s->stop - p;
    name *const end = table->names + table->count;
    if (left < 8) { /* so near to the end that no record is whole any more, but for names of a few bytes */
        for (name *n = table->names; n < end; n++) {
            if (left >= n->length && !memcmp(p, n->text, (size_t)n->length)) return *before = n;
        }
        return NULL;
    }
    const uint64_t word = word_at(p);
    name *const guess = (*before)->follower;
    if (is_name(guess, p, word, left)) return *before = guess;
    for (name *n = table->names; n < end; n++) {
        if (is_name(n, p, word, left)) {
            (*before)->follower = n;
            return *before = n;
        }
    }
    return NULL;
}
