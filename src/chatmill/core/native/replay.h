/* Templates replayed: turns of loops over messages, by the tries of what they asked (replay.py).
 *
 * A turn walks a trie: at each node a question, whose reply leads on, and at the end a leaf with the segments that the turn
 * writes. What is not known here is asked of the caller once, and kept.
 */

#include <stdlib.h>

enum { OF_MESSAGE, COMPARES, REMAINDER, POSITION, STATE, LOOP, SETS, MAKES, ASKED }; /* what a node does */
enum { FROM_OWN, FROM_FIRST, FROM_LAST, OF_RECORD };                                 /* what addresses count from */
enum { ASK_MESSAGE, ASK_STATE, ASK_TABLE, ASK_OTHER, ASK_PLACED, ASK_PROBED }; /* what a caller is asked */
enum { KNOWN, UNKNOWN, REFUSED, FAILED };                                            /* how a rendering ends */
enum { OWN = -1, COUNT = -2 };                                                       /* bases of forms; others: registers */
enum { MAX_NUMBERS = 6, MAX_REGISTERS = 64, MAX_SPACES = 32, MAX_NAMES = 32, MAX_HOLES = 32, MAX_NESTING = 8, MAX_QUIET = 12 };
enum { MAX_OUTPUTS = 1 << 28, MAX_WALKS = 1 << 28 }; /* of all renderings of one conversation: 2 gigabytes, half a minute */
enum { TOO_LONG = -2 };                                /* in place of what is returned of a conversation with more */
enum { NO_CHILD = INT32_MIN };
enum { NO_PROBE = -1, NO_LOOP = -1, FIRST_UNKNOWN = -2 };
enum { THE_COUNT = -1, OF_LOOP = -2, NOWHERE = -3 };     /* where numbers come from that are not in a namespace */
enum { THE_REPLY = -1, THE_RECIPE = -2 };               /* what a value must have, if it is no number of it */

typedef int64_t (*asked_function)(int64_t what, int64_t a, int64_t b, int64_t c);

/* A map from three numbers to one; `count` is how many are used. Keys of nodes have no third number. */
typedef struct {
    int64_t b;
    int32_t a, c, value, used;
} mapped;

typedef struct {
    mapped *entries;
    int64_t count, capacity;
} map;

static mapped *spot(const map *m, int64_t a, int64_t b, int64_t c)
{
    uint64_t h = (uint64_t)a * 0x9E3779B97F4A7C15u ^ (uint64_t)b * 0xC2B2AE3D27D4EB4Fu ^ (uint64_t)c * 0x165667B19E3779F9u;
    h ^= h >> 29;
    for (int64_t i = (int64_t)(h & (uint64_t)(m->capacity - 1));; i = (i + 1) & (m->capacity - 1)) {
        mapped *e = &m->entries[i];
        if (!e->used || (e->a == a && e->b == b && e->c == c)) return e;
    }
}

static int64_t looked_up(const map *m, int64_t a, int64_t b, int64_t c)
{
    if (!m->count) return NO_CHILD;
    const mapped *e = spot(m, a, b, c);
    return e->used ? e->value : NO_CHILD;
}

static int put_in(map *m, int64_t a, int64_t b, int64_t c, int64_t value)
{
    if (2 * (m->count + 1) > m->capacity) {
        const map old = *m;
        m->capacity = old.capacity ? 2 * old.capacity : 256;
        m->entries = calloc((size_t)m->capacity, sizeof *m->entries);
        if (!m->entries) {
            *m = old;
            return 0;
        }
        for (int64_t i = 0; i < old.capacity; i++)
            if (old.entries[i].used)
                *spot(m, old.entries[i].a, old.entries[i].b, old.entries[i].c) = old.entries[i];
        free(old.entries);
    }
    mapped *e = spot(m, a, b, c);
    m->count += !e->used;
    *e = (mapped){b, (int32_t)a, (int32_t)c, (int32_t)value, 1};
    return 1;
}

typedef struct {
    int32_t what, a, b, c;
} node;

typedef struct {
    int32_t first, count; /* of its terms */
    int64_t constant;
} form;

typedef struct {
    int32_t base, factor;
} term;

/* How a turn makes a value: the forms of its numbers, and what it looks like to the turn that reads it. */
typedef struct {
    int32_t first, count; /* of its forms, in `numbers` */
    int32_t moves;
    int64_t reply; /* where it does not move */
} recipe;

typedef struct {
    int32_t is_message, is_moving, is_reversed, left_out;
    int32_t start, stop; /* forms; a stop is that of a range */
    int32_t first, count; /* of the recipes of its arguments, in `numbers` */
    int32_t moves;
} loop;

typedef struct {
    int32_t first, count; /* of what is written, in `numbers` */
    uint8_t is_refused, breaks, is_keyed;
} leaf;

enum { BY_NUMBER, BY_CLASS, BY_RECORD }; /* what replies are kept by */

/* The replies to one question: of messages by their number in a conversation or by their class, or of tools and options. */
typedef struct {
    int32_t *replies;
    int64_t capacity;
    int64_t serial; /* of the conversation, or of the tools, that the replies are of */
    int32_t by;
} column;

typedef struct {
    int32_t recipe, own; /* no value where the recipe is negative */
    int64_t numbers[MAX_NUMBERS];
} value;

typedef struct {
    int32_t segment, base;
} output;

/* Loops of one conversation go over the same messages again and again: P(i), A(i) and F differ in the number of messages.
 * A loop that goes forward keeps what its turns depend on besides their own messages, and goes on where that first differs. */

/* What a step depends on: a variable that lies in a range, or a value that a namespace held when the loop began. The
 * variables are the number of messages, the loop's registers, and numbers of values in namespaces. */
typedef struct {
    int32_t step, space, name, number;
    int64_t low, high; /* of a value itself its reply, or its recipe and who made it */
} need;

typedef struct {
    int32_t step, space, name;
    value held;
} change;

typedef struct {
    list needs, changes, ends, outputs; /* of each step: where its outputs end */
    int64_t start, serial;
    int32_t spaces, broke, is_back, is_open; /* whether what the steps do is kept */
    int64_t quiet_from;             /* of a loop that goes back: from here on nothing happens, as long as its needs hold */
    int32_t quiet_count;
    need quiet[MAX_QUIET];
} steps;

typedef struct {
    list nodes, forms, terms, recipes, loops, leaves, columns, numbers, outputs, placed, taken;
    map children, states, tables, places;
    asked_function ask;
    int64_t absent, missing; /* the replies of a value that is not there, and of a message that is not */
    /* of the rendering that runs */
    const int32_t *classes;
    int64_t count, messages;
    int64_t probe; /* the message that is the last one here in place of that of the conversation; NO_PROBE for none */
    value spaces[MAX_SPACES][MAX_NAMES];
    int32_t space_count, depth, is_keyed;
    int64_t serial; /* of the renderings that are made together */
    int64_t record; /* of its tools and options */
    int64_t conversation; /* whose messages have the replies that are kept by number */
    int64_t walks; /* so far, of the renderings that are made together */
    int32_t is_too_long;
    steps *open;    /* of the outermost loop that runs */
    int32_t step, is_bound; /* the step that runs, and whether it cannot be taken again */
    uint8_t is_changed[MAX_SPACES][MAX_NAMES]; /* by the outermost loop that runs */
    /* of a rendering that ends in a loop of the root: which one, how many turns at most, and what was found of them */
    int64_t watched, limit, turns, begin, is_over;
    int64_t loop, start, stop, given[MAX_REGISTERS], given_count; /* that loop, its borders, and what it hands to turns */
} replayer;

EXPORT void *chatmill_replayer(asked_function ask, int64_t absent, int64_t missing)
{
    replayer *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->ask = ask;
    r->absent = absent;
    r->missing = missing;
    return r;
}

EXPORT void chatmill_replayer_free(replayer *r)
{
    if (!r) return;
    for (int64_t i = 0; i < r->columns.count; i++) free(ITEM(column, r->columns, i).replies);
    for (int64_t i = 0; i < r->taken.count; i++) {
        steps *s = &ITEM(steps, r->taken, i);
        free(s->needs.data), free(s->changes.data), free(s->ends.data), free(s->outputs.data);
    }
    list *const lists[] = {&r->nodes,  &r->forms,   &r->terms,   &r->recipes, &r->loops,
                           &r->leaves, &r->columns, &r->numbers, &r->outputs, &r->placed, &r->taken};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) free(lists[i]->data);
    map *const maps[] = {&r->children, &r->states, &r->tables, &r->places};
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) free(maps[i]->entries);
    free(r);
}

static int64_t kept_numbers(replayer *r, const int64_t *numbers, int64_t count)
{
    const int64_t first = r->numbers.count;
    int32_t *place = appended(&r->numbers, count, sizeof *place);
    if (!place) return -1;
    for (int64_t i = 0; i < count; i++) place[i] = (int32_t)numbers[i];
    return first;
}

/* Each of these adds something, and returns its number or -1 where memory ends. */

EXPORT int64_t chatmill_add_form(replayer *r, const int64_t *pairs, int64_t count, int64_t constant)
{
    form *f = appended(&r->forms, 1, sizeof *f);
    term *t = f ? appended(&r->terms, count, sizeof *t) : NULL;
    if (!t) return -1;
    *f = (form){(int32_t)(r->terms.count - count), (int32_t)count, constant};
    for (int64_t i = 0; i < count; i++) t[i] = (term){(int32_t)pairs[2 * i], (int32_t)pairs[2 * i + 1]};
    return r->forms.count - 1;
}

EXPORT int64_t chatmill_add_recipe(replayer *r, const int64_t *forms, int64_t count, int64_t moves, int64_t reply)
{
    const int64_t first = count > MAX_NUMBERS ? -1 : kept_numbers(r, forms, count);
    recipe *made = first < 0 ? NULL : appended(&r->recipes, 1, sizeof *made);
    if (!made) return -1;
    *made = (recipe){(int32_t)first, (int32_t)count, (int32_t)moves, reply};
    return r->recipes.count - 1;
}

/* `shape` holds the fields of a loop up to `stop`, then `moves`. */
EXPORT int64_t chatmill_add_loop(replayer *r, const int64_t *shape, const int64_t *recipes, int64_t count)
{
    const int64_t first = kept_numbers(r, recipes, count);
    loop *made = first < 0 ? NULL : appended(&r->loops, 1, sizeof *made);
    if (!made) return -1;
    steps *taken = appended(&r->taken, 1, sizeof *taken);
    if (!taken) return -1;
    memset(taken, 0, sizeof *taken);
    taken->serial = -1;
    *made = (loop){(int32_t)shape[0], (int32_t)shape[1], (int32_t)shape[2], (int32_t)shape[3], (int32_t)shape[4],
                   (int32_t)shape[5], (int32_t)first,    (int32_t)count,    (int32_t)shape[6]};
    return r->loops.count - 1;
}

EXPORT int64_t chatmill_add_node(replayer *r, int64_t what, int64_t a, int64_t b, int64_t c)
{
    node *made = appended(&r->nodes, 1, sizeof *made);
    if (!made) return -1;
    *made = (node){(int32_t)what, (int32_t)a, (int32_t)b, (int32_t)c};
    return r->nodes.count - 1;
}

/* Numbers that a node of what makes a namespace points to: pairs of a name and a recipe, after how many there are. */
EXPORT int64_t chatmill_add_numbers(replayer *r, const int64_t *numbers, int64_t count)
{
    return kept_numbers(r, numbers, count);
}

EXPORT int64_t chatmill_add_leaf(replayer *r, const int64_t *written, int64_t count, int64_t refused, int64_t breaks,
                                 int64_t keyed)
{
    const int64_t first = kept_numbers(r, written, count);
    leaf *made = first < 0 ? NULL : appended(&r->leaves, 1, sizeof *made);
    if (!made) return -1;
    *made = (leaf){(int32_t)first, (int32_t)count, (uint8_t)refused, (uint8_t)breaks, (uint8_t)keyed};
    return r->leaves.count - 1;
}

EXPORT int64_t chatmill_add_column(replayer *r, int64_t by)
{
    column *made = appended(&r->columns, 1, sizeof *made);
    if (!made) return -1;
    *made = (column){NULL, 0, 0, (int32_t)by};
    return r->columns.count - 1;
}

/* A child is a node, or ~leaf. Tables are nodes that ask nothing. */
EXPORT int64_t chatmill_link(replayer *r, int64_t parent, int64_t reply, int64_t child)
{
    return put_in(&r->children, parent, reply, 0, child) ? 0 : -1;
}

/* Segments whose paths count from either end are placed for each position and number of messages. */
EXPORT int64_t chatmill_place(replayer *r, int64_t segment, int64_t by_count)
{
    while (r->placed.count <= segment) {
        uint8_t *p = appended(&r->placed, 1, 1);
        if (!p) return -1;
        *p = 0;
    }
    ITEM(uint8_t, r->placed, segment) = by_count ? 2 : 1;
    return 0;
}

/* Forget the replies of messages by their numbers: from now on it is another conversation that is asked. */
EXPORT void chatmill_other_conversation(replayer *r) { r->conversation++; }

/* Forget the replies of classes: from now on messages have others. */
EXPORT void chatmill_forget_classes(replayer *r)
{
    for (int64_t i = 0; i < r->columns.count; i++) {
        column *c = &ITEM(column, r->columns, i);
        if (c->by == BY_CLASS && c->capacity) memset(c->replies, 0xff, (size_t)c->capacity * sizeof *c->replies);
    }
}

static int64_t value_of(const replayer *r, int32_t number, int64_t own, const int64_t *registers)
{
    const form f = ITEM(form, r->forms, number);
    int64_t total = f.constant;
    for (int32_t i = f.first; i < f.first + f.count; i++) {
        const term t = ITEM(term, r->terms, i);
        total += t.factor * (t.base == OWN ? own : t.base == COUNT ? r->count : registers[t.base]);
    }
    return total;
}

static int64_t cached(replayer *r, map *m, int64_t what, int64_t a, int64_t b, int64_t c)
{
    int64_t found = looked_up(m, a, b, c);
    if (found == NO_CHILD) {
        found = r->ask(what, a, b, c);
        if (found >= 0) put_in(m, a, b, c, found);
    }
    return found;
}

/* Where a message of the rendering is among those of the conversation and its probes. */
static int64_t place_of(const replayer *r, int64_t at)
{
    return r->probe != NO_PROBE && at == r->count - 1 ? r->probe : at;
}

static int64_t of_message(replayer *r, const node *n, int64_t own)
{
    int64_t at = n->b == FROM_OWN ? own + n->c : n->b == FROM_FIRST ? n->c : n->b == FROM_LAST ? r->count + n->c : 0;
    if (n->b != OF_RECORD && (at < 0 || at >= r->count)) return r->missing;
    if (n->b != OF_RECORD) at = place_of(r, at);
    column *c = &ITEM(column, r->columns, n->a);
    const int64_t place = c->by == BY_CLASS ? r->classes[at] : c->by == BY_RECORD ? 0 : at;
    const int64_t serial = c->by == BY_CLASS ? 0 : c->by == BY_RECORD ? r->record : r->conversation;
    if (c->serial != serial) {
        if (c->capacity) memset(c->replies, 0xff, (size_t)c->capacity * sizeof *c->replies);
        c->serial = serial;
    }
    if (place >= c->capacity) {
        const int64_t capacity = c->by == BY_RECORD ? 1 : 2 * place + 64;
        int32_t *grown = realloc(c->replies, (size_t)capacity * sizeof *grown);
        if (!grown) return -1;
        memset(grown + c->capacity, 0xff, (size_t)(capacity - c->capacity) * sizeof *grown);
        c->replies = grown;
        c->capacity = capacity;
    }
    if (c->replies[place] < 0) {
        const int64_t said = r->ask(ASK_MESSAGE, n->a, at, 0);
        if (said < 0) return -1;
        c = &ITEM(column, r->columns, n->a); /* the caller may have added some */
        c->replies[place] = (int32_t)said;
    }
    return c->replies[place];
}

static value made_value(const replayer *r, int32_t number, int64_t own, const int64_t *registers)
{
    const recipe made = ITEM(recipe, r->recipes, number);
    value v = {number, (int32_t)own, {0}};
    for (int32_t i = 0; i < made.count; i++)
        v.numbers[i] = value_of(r, ITEM(int32_t, r->numbers, made.first + i), own, registers);
    return v;
}

/* ---- what steps depend on */

static int is_noted(const replayer *r) { return r->open && r->open->is_open && r->depth == 2 && !r->is_bound; }

static void needs(replayer *r, int32_t space, int32_t name, int32_t number, int64_t low, int64_t high)
{
    need *n = is_noted(r) ? appended(&r->open->needs, 1, sizeof *n) : NULL;
    if (n) *n = (need){r->step, space, name, number, low, high};
}

static int holds(const replayer *r, const need *n, const int64_t *registers)
{
    int64_t x = r->count;
    if (n->space == THE_COUNT && r->probe != NO_PROBE && x - 1 < n->low) return 0; /* the last message is another one */
    if (n->space == OF_LOOP) {
        x = registers[n->number];
    } else if (n->space >= 0) {
        const value *v = &r->spaces[n->space][n->name];
        if (n->number == THE_RECIPE) return v->recipe == n->low && v->own == n->high;
        if (v->recipe < 0) return n->number == THE_REPLY && n->low == r->absent;
        const recipe made = ITEM(recipe, r->recipes, v->recipe);
        if (n->number == THE_REPLY) return !made.moves && made.reply == n->low;
        if (n->number >= made.count) return 0;
        x = v->numbers[n->number];
    }
    return n->low <= x && x <= n->high;
}

/* Where the number in a register comes from. */
typedef struct {
    int32_t space, name, number;
} origin;

static origin origin_of(const term *t, const origin *origins)
{
    if (t->base == OWN) return (origin){NOWHERE, 0, 0};
    return t->base == COUNT ? (origin){THE_COUNT, 0, 0} : origins[t->base];
}

/* A form is given away: whatever it is made of must stay as it is. */
static void needs_exactly(replayer *r, int32_t number, const int64_t *registers, const origin *origins)
{
    if (!is_noted(r)) return;
    const form f = ITEM(form, r->forms, number);
    for (int32_t i = f.first; i < f.first + f.count; i++) {
        const term t = ITEM(term, r->terms, i);
        const origin from = origin_of(&t, origins);
        const int64_t x = t.base == COUNT ? r->count : t.base == OWN ? 0 : registers[t.base];
        if (from.space != NOWHERE) needs(r, from.space, from.name, from.number, x, x);
    }
}

static void needs_recipe(replayer *r, int32_t number, const int64_t *registers, const origin *origins)
{
    const recipe made = ITEM(recipe, r->recipes, number);
    for (int32_t i = 0; i < made.count; i++)
        needs_exactly(r, ITEM(int32_t, r->numbers, made.first + i), registers, origins);
}

/* A form compares with a bound: where one number decides it, any number on the same side will do. */
static void needs_compared(replayer *r, const node *n, int64_t total, int reply, const int64_t *registers,
                           const origin *origins)
{
    if (!is_noted(r)) return;
    const form f = ITEM(form, r->forms, n->a);
    origin from = {NOWHERE, 0, 0};
    int64_t x = 0, factor = 0;
    for (int32_t i = f.first; i < f.first + f.count; i++) {
        const term t = ITEM(term, r->terms, i);
        const origin one = origin_of(&t, origins);
        if (one.space == NOWHERE) continue;
        if (factor || (t.factor != 1 && t.factor != -1)) {
            needs_exactly(r, n->a, registers, origins);
            return;
        }
        from = one;
        factor = t.factor;
        x = t.base == COUNT ? r->count : registers[t.base];
    }
    if (!factor) return;
    const int64_t border = (n->c - (total - factor * x)) * factor, far = INT64_MAX / 4;
    static const int32_t turned[] = {0, 3, 4, 1, 2};
    const int32_t symbol = factor < 0 ? turned[n->b] : n->b;
    int64_t low = -far, high = far;
    if (symbol == 0) {
        low = reply ? border : x > border ? border + 1 : -far;
        high = reply ? border : x > border ? far : border - 1;
    } else {
        const int below = symbol == 1 || symbol == 2 ? reply : !reply; /* x is on the lower side */
        const int64_t last = symbol == 1 || symbol == 4 ? border - 1 : border;
        low = below ? -far : last + 1;
        high = below ? last : far;
    }
    needs(r, from.space, from.name, from.number, low, high);
}

static int walk(replayer *r, int64_t table, int64_t reply, int64_t own, const int64_t *given, int32_t given_count,
                int *breaks);

/* Take the steps of a loop that are as they were; how many, or -1 where the loop ended with them. */
static int64_t begin_steps(replayer *r, steps *s, int64_t size, const int64_t *registers)
{
    int64_t limit = s->ends.count < size ? s->ends.count : size, kept = 0, changed = 0;
    if (r->probe != NO_PROBE && limit > r->count - 1 - s->start) limit = r->count - 1 - s->start;
    if (limit < 0) limit = 0;
    for (; kept < s->needs.count && ITEM(need, s->needs, kept).step < limit; kept++)
        if (!holds(r, &ITEM(need, s->needs, kept), registers)) limit = ITEM(need, s->needs, kept).step;
    while (kept > 0 && ITEM(need, s->needs, kept - 1).step >= limit) kept--;
    memset(r->is_changed, 0, sizeof r->is_changed);
    for (; changed < s->changes.count && ITEM(change, s->changes, changed).step < limit; changed++) {
        const change *c = &ITEM(change, s->changes, changed);
        r->spaces[c->space][c->name] = c->held;
        r->is_changed[c->space][c->name] = 1;
    }
    s->needs.count = kept;
    s->changes.count = changed;
    s->ends.count = limit;
    s->outputs.count = limit ? ITEM(int64_t, s->ends, limit - 1) : 0;
    s->is_open = r->probe == NO_PROBE; /* what a probe does is not for the renderings after it */
    output *copied = appended(&r->outputs, s->outputs.count, sizeof *copied);
    if (copied && s->outputs.count) memcpy(copied, s->outputs.data, (size_t)s->outputs.count * sizeof *copied);
    if (s->broke > limit) s->broke = 0;
    return s->broke ? -1 : limit;
}

static void begin_step(replayer *r, steps *s, int32_t step)
{
    if (!s) return;
    r->step = step;
    r->is_bound = 0;
}

static void end_step(replayer *r, steps *s, int32_t step, int is_known, int breaks, int64_t before)
{
    if (!s || !s->is_open) return;
    const int64_t size = r->outputs.count - before;
    if (is_known && !r->is_bound) {
        int64_t *end = appended(&s->ends, 1, sizeof *end);
        output *copied = appended(&s->outputs, size, sizeof *copied);
        if (end && copied) {
            memcpy(copied, &ITEM(output, r->outputs, before), (size_t)size * sizeof *copied);
            *end = s->outputs.count;
            if (breaks) s->broke = step + 1;
            return;
        }
    }
    s->is_open = 0; /* neither this step nor one after it can be taken again */
    while (s->needs.count && ITEM(need, s->needs, s->needs.count - 1).step >= step) s->needs.count--;
    while (s->changes.count && ITEM(change, s->changes, s->changes.count - 1).step >= step) s->changes.count--;
}

static int is_quiet(const replayer *r, const steps *s, const int64_t *registers)
{
    for (int32_t i = 0; i < s->quiet_count; i++)
        if (!holds(r, &s->quiet[i], registers)) return 0;
    return 1;
}

/* Keep from where on the last steps of a loop that goes back did nothing: they began at `first`, and were `count`. */
static void keep_quiet(steps *s, int64_t first, int64_t count, int is_all)
{
    if (s->ends.count < count) return; /* some were not kept */
    if (is_all) s->quiet_count = 0;
    int64_t last = s->needs.count;
    int64_t from = is_all ? -1 : s->quiet_from;
    if (!is_all && first - count != s->quiet_from) return;
    for (int64_t step = count - 1; step >= 0; step--) {
        const int64_t begin = step ? ITEM(int64_t, s->ends, step - 1) : 0;
        if (ITEM(int64_t, s->ends, step) > begin) break;
        if (s->changes.count && ITEM(change, s->changes, s->changes.count - 1).step >= step) break;
        int32_t added = s->quiet_count;
        for (; last > 0 && ITEM(need, s->needs, last - 1).step == step; last--) {
            const need *n = &ITEM(need, s->needs, last - 1);
            int32_t known = 0;
            while (known < added && (s->quiet[known].space != n->space || s->quiet[known].name != n->name ||
                                     s->quiet[known].number != n->number || s->quiet[known].low != n->low ||
                                     s->quiet[known].high != n->high))
                known++;
            if (known < added) continue;
            if (added == MAX_QUIET) goto done;
            s->quiet[added++] = *n;
        }
        s->quiet_count = added;
        from = first - step;
    }
done:
    s->quiet_from = from;
}

/* All turns of a loop, or those of a watched one that are known; what they write is at the end of the outputs. */
static int run_loop(replayer *r, int32_t number, int64_t outer, const int64_t *outer_registers, int is_watched)
{
    const loop l = ITEM(loop, r->loops, number);
    int64_t registers[MAX_REGISTERS];
    int32_t count = 0;
    for (int32_t i = 0; i < l.count; i++) {
        const int32_t argument = ITEM(int32_t, r->numbers, l.first + i);
        const value v = made_value(r, argument, outer, outer_registers);
        const int32_t size = ITEM(recipe, r->recipes, argument).count;
        if (count + size + 2 > MAX_REGISTERS) return UNKNOWN;
        memcpy(registers + count, v.numbers, (size_t)size * sizeof *registers);
        count += size;
    }
    const int64_t start = value_of(r, l.start, outer, outer_registers);
    int64_t size, first;
    if (l.is_message) {
        size = r->count - l.left_out - start;
        first = l.is_reversed ? start + size - 1 : start;
    } else {
        const int64_t stop = value_of(r, l.stop, outer, outer_registers);
        size = l.is_reversed ? start - stop : stop - start;
        first = start;
    }
    if (size < 0) size = 0;
    if (is_watched) {
        r->loop = number;
        r->start = start;
        r->stop = l.is_message ? 0 : value_of(r, l.stop, outer, outer_registers);
        r->given_count = count;
        memcpy(r->given, registers, (size_t)count * sizeof *registers);
    }
    if (l.is_moving) {
        registers[count++] = size ? first : 0;
        registers[count++] = size;
    }
    const int32_t spaces = r->space_count;
    const int64_t table = l.moves ? 0 : cached(r, &r->tables, ASK_TABLE, number, spaces, 0);
    steps *s = r->depth == 1 && !l.moves && !is_watched ? &ITEM(steps, r->taken, number) : NULL;
    int64_t i = 0;
    if (s) {
        const int is_same = s->serial == r->serial && s->spaces == spaces && s->start == start;
        i = begin_steps(r, s, is_same && !l.is_reversed ? size : 0, registers);
        if (!is_same) s->quiet_from = -1;
        s->serial = r->serial;
        s->spaces = spaces;
        s->start = start;
        s->is_back = l.is_reversed;
        r->open = s;
        if (i < 0) i = size; /* it ended early */
    }
    int ended = KNOWN, breaks = 0;
    const int64_t last = is_watched && r->limit < size ? r->limit : size;
    for (; i < last && ended == KNOWN && !breaks; i++) {
        const int64_t own = l.is_reversed ? first - i : first + i;
        if (s && s->is_back && own <= s->quiet_from && is_quiet(r, s, registers)) break;
        int64_t turns = l.moves ? cached(r, &r->tables, ASK_TABLE, number, spaces, outer - own) : table, shape = 0;
        if (turns >= 0 && l.is_message) {
            const node of_shape = {OF_MESSAGE, 0, FROM_OWN, 0};
            if (own < 0 || own >= r->count) return UNKNOWN;
            shape = of_message(r, &of_shape, own);
        }
        if (turns < 0 || shape < 0) return FAILED;
        const int64_t before = r->outputs.count;
        begin_step(r, s, (int32_t)i);
        ended = walk(r, turns, shape, own, registers, count, &breaks);
        r->space_count = spaces;
        end_step(r, s, (int32_t)i, ended == KNOWN, breaks, before);
    }
    if (s && s->is_back && s->is_open && ended == KNOWN && !breaks) keep_quiet(s, first, i, i == size);
    if (s) r->open = NULL;
    if (is_watched) {
        r->turns = i - (ended != KNOWN);
        r->is_over = ended == KNOWN && (breaks || i == size);
    }
    return ended;
}

static int write_leaf(replayer *r, const leaf *l, int64_t own, int64_t begin, const int64_t *holes)
{
    const int64_t end = r->outputs.count;
    for (int32_t i = 0; i < l->count; i++) {
        const int32_t one = ITEM(int32_t, r->numbers, l->first + i);
        if (one < 0) {
            const int64_t from = holes[~one], size = holes[~one + 1] - from;
            output *place = appended(&r->outputs, size, sizeof *place);
            if (!place) return FAILED;
            memcpy(place, &ITEM(output, r->outputs, from), (size_t)size * sizeof *place);
            continue;
        }
        int64_t segment = one;
        if (segment < r->placed.count && ITEM(uint8_t, r->placed, segment)) {
            const int by_count = ITEM(uint8_t, r->placed, segment) == 2;
            if (by_count) r->is_bound = 1;
            segment = cached(r, &r->places, ASK_PLACED, segment, own, by_count ? r->count : 0);
            if (segment < 0) return FAILED;
        }
        output *place = appended(&r->outputs, 1, sizeof *place);
        if (!place) return FAILED;
        *place = (output){(int32_t)segment, (int32_t)own};
    }
    const int64_t written = r->outputs.count - end;
    if (end > begin) {
        memmove(&ITEM(output, r->outputs, begin), &ITEM(output, r->outputs, end), (size_t)written * sizeof(output));
        r->outputs.count = begin + written;
    }
    return KNOWN;
}

static int compares(int64_t one, int32_t symbol, int64_t other)
{
    switch (symbol) {
    case 0: return one == other;
    case 1: return one < other;
    case 2: return one <= other;
    case 3: return one > other;
    default: return one >= other;
    }
}

static int walk(replayer *r, int64_t table, int64_t reply, int64_t own, const int64_t *given, int32_t given_count,
                int *breaks)
{
    if (r->depth >= MAX_NESTING) return UNKNOWN;
    if (++r->walks > MAX_WALKS || r->outputs.count > MAX_OUTPUTS) r->is_too_long = 1;
    if (r->is_too_long) return FAILED;
    r->depth++;
    int64_t registers[MAX_REGISTERS], holes[MAX_HOLES + 1];
    origin origins[MAX_REGISTERS];
    int32_t register_count = given_count, hole_count = 0;
    if (given_count) memcpy(registers, given, (size_t)given_count * sizeof *registers);
    for (int32_t i = 0; i < given_count; i++) origins[i] = (origin){OF_LOOP, 0, i};
    const int64_t begin = holes[0] = r->outputs.count;
    int ended = KNOWN;
    int64_t child = looked_up(&r->children, table, reply, 0);
    while (ended == KNOWN && child >= 0) {
        const node n = ITEM(node, r->nodes, child);
        reply = 0;
        switch (n.what) {
        case OF_MESSAGE:
            reply = of_message(r, &n, own);
            if (n.b == FROM_LAST) {
                needs(r, THE_COUNT, 0, 0, r->count, r->count);
            } else if (n.b != OF_RECORD && (n.b != FROM_OWN || n.c > 0)) {
                const int64_t at = n.b == FROM_OWN ? own + n.c : n.c;
                needs(r, THE_COUNT, 0, 0, at < r->count ? at + 1 : 0, at < r->count ? INT64_MAX : at);
            }
            break;
        case COMPARES: {
            const int64_t total = value_of(r, n.a, own, registers);
            reply = compares(total, n.b, n.c);
            needs_compared(r, &n, total, (int)reply, registers, origins);
            break;
        }
        case POSITION:
            reply = value_of(r, n.a, own, registers);
            needs_exactly(r, n.a, registers, origins);
            break;
        case REMAINDER: {
            const int64_t rest = value_of(r, n.a, own, registers) % n.b;
            reply = rest < 0 ? rest + n.b : rest;
            needs_exactly(r, n.a, registers, origins);
            break;
        }
        case STATE: {
            if (n.a >= r->space_count) {
                ended = UNKNOWN;
                break;
            }
            const value *v = &r->spaces[n.a][n.b];
            const int is_outer = is_noted(r) && n.a < r->open->spaces && !r->is_changed[n.a][n.b];
            if (v->recipe < 0) {
                reply = r->absent;
                if (is_outer) needs(r, n.a, n.b, THE_REPLY, reply, 0);
                break;
            }
            const recipe made = ITEM(recipe, r->recipes, v->recipe);
            const int64_t number = v->recipe, delta = v->own - own;
            if (register_count + made.count > MAX_REGISTERS) {
                ended = UNKNOWN;
                break;
            }
            for (int32_t i = 0; i < made.count; i++, register_count++) {
                registers[register_count] = v->numbers[i];
                origins[register_count] = is_outer ? (origin){n.a, n.b, i} : (origin){NOWHERE, 0, 0};
            }
            if (is_outer && made.moves) {
                needs(r, n.a, n.b, THE_RECIPE, number, v->own);
            } else if (is_outer) {
                needs(r, n.a, n.b, THE_REPLY, made.reply, 0);
            }
            reply = made.moves ? cached(r, &r->states, ASK_STATE, number, delta, 0) : made.reply;
            break;
        }
        case LOOP: {
            if (hole_count >= MAX_HOLES) {
                ended = UNKNOWN;
                break;
            }
            const int32_t spaces = r->space_count;
            if (r->depth > 1) r->is_bound = 1;
            const int is_watched = r->depth == 1 && hole_count == r->watched;
            const int looped = run_loop(r, n.a, own, registers, is_watched);
            if (is_watched) {
                r->begin = holes[hole_count];
                ended = UNKNOWN;
                break;
            }
            if (looped == UNKNOWN && r->depth == 1 && r->watched == FIRST_UNKNOWN) r->watched = hole_count;
            if (looped == UNKNOWN || looped == FAILED) ended = looped;
            reply = looped == REFUSED;
            if (looped == REFUSED) r->space_count = spaces;
            holes[++hole_count] = r->outputs.count;
            break;
        }
        case SETS:
            if (n.a >= r->space_count) {
                ended = UNKNOWN;
            } else {
                const value made = r->spaces[n.a][n.b] = made_value(r, n.c, own, registers);
                if (is_noted(r) && n.a < r->open->spaces) {
                    needs_recipe(r, n.c, registers, origins);
                    change *c = appended(&r->open->changes, 1, sizeof *c);
                    if (c) *c = (change){r->step, n.a, n.b, made};
                    r->is_changed[n.a][n.b] = !r->open->is_back;
                }
            }
            break;
        case MAKES: {
            if (r->space_count >= MAX_SPACES) {
                ended = UNKNOWN;
                break;
            }
            value *made = r->spaces[r->space_count++];
            for (int i = 0; i < MAX_NAMES; i++) made[i].recipe = -1;
            const int32_t *pairs = &ITEM(int32_t, r->numbers, n.a);
            for (int32_t i = 0; i < pairs[0]; i++) {
                made[pairs[1 + 2 * i]] = made_value(r, pairs[2 + 2 * i], own, registers);
                needs_recipe(r, pairs[2 + 2 * i], registers, origins);
            }
            break;
        }
        default:
            r->is_bound = 1;
            if (r->probe != NO_PROBE) {
                reply = r->ask(ASK_PROBED, n.a | r->probe << 32, own, r->count);
            } else if (n.b > 0 && own >= 0) { /* whatever the number of messages: its reply is kept */
                const node kept = {OF_MESSAGE, n.b, FROM_OWN, 0};
                reply = of_message(r, &kept, own);
            } else {
                reply = r->ask(ASK_OTHER, n.a, own, r->count);
            }
            break;
        }
        if (reply < 0 && n.what != POSITION) ended = FAILED;
        if (ended == KNOWN) child = looked_up(&r->children, child, reply, 0);
    }
    r->depth--;
    if (ended != KNOWN) return ended;
    if (child == NO_CHILD) return UNKNOWN;
    const leaf l = ITEM(leaf, r->leaves, ~child);
    if (!l.is_keyed) r->is_keyed = 0;
    if (l.is_refused) return REFUSED;
    *breaks = l.breaks;
    return write_leaf(r, &l, own, begin, holes);
}

typedef struct {
    int64_t table, reply, count; /* the root's trie, the reply that leads into it, and the number of messages */
    int64_t probe;               /* the one that is the last of them, among the probes after the messages; or NO_PROBE */
    int64_t ended, first, stop, same; /* how it ended, its outputs, and how many are those of the last rendering */
} rendering;

static int64_t alike(const output *one, int64_t size, const output *other, int64_t other_size)
{
    const int64_t most = size < other_size ? size : other_size;
    int64_t same = 0;
    while (same < most && one[same].segment == other[same].segment && one[same].base == other[same].base) same++;
    return same;
}

/* One rendering; what it writes is at the end of the outputs. */
static void render_one(replayer *r, rendering *one)
{
    r->count = one->count;
    r->probe = one->probe;
    r->space_count = r->depth = 0;
    r->open = NULL;
    one->first = r->outputs.count;
    int breaks = 0;
    one->ended = walk(r, one->table, one->reply, -1, NULL, 0, &breaks);
    if (one->ended != KNOWN) r->outputs.count = one->first;
    one->stop = r->outputs.count;
}

/* Renderings of the first messages of one conversation, of which `classes` are those of its messages, and after them of
 * its probes. The last one is written whole, of each other what follows where it leaves that: `same` outputs are in both,
 * and those between `first + same` and `stop` follow. Outputs are in `*outputs` until the next call. Returns whether all
 * leaves are keyed, or TOO_LONG. */
EXPORT int64_t chatmill_replay(replayer *r, int64_t record, const int32_t *classes, int64_t messages, rendering *renderings,
                               int64_t count, const output **outputs)
{
    r->classes = classes;
    r->messages = messages;
    r->outputs.count = 0;
    r->is_keyed = 1;
    r->serial++;
    r->record = record;
    r->walks = r->is_too_long = 0;
    r->watched = NO_LOOP;
    rendering *whole = count ? &renderings[count - 1] : NULL;
    if (whole) {
        render_one(r, whole);
        whole->same = whole->stop;
    }
    for (int64_t i = 0; i < count - 1 && !r->is_too_long; i++) {
        rendering *one = &renderings[i];
        render_one(r, one);
        output *written = r->outputs.data;
        const int64_t begin = one->first;
        one->same = alike(written + begin, one->stop - begin, written, whole->stop);
        const int64_t following = one->stop - begin - one->same;
        if (following) memmove(written + begin, written + begin + one->same, (size_t)following * sizeof *written);
        one->first = begin - one->same;
        one->stop = r->outputs.count = begin + following;
    }
    r->probe = NO_PROBE;
    if (r->is_too_long) return TOO_LONG;
    *outputs = r->outputs.data;
    return r->is_keyed;
}

/* How many turns of one of the root's loops are known, up to a limit; -1 where what comes before it is not. If FIRST_UNKNOWN
 * is watched, nothing but which loop that is. `found` has whether the loop is over after them, whether all leaves are
 * keyed, where their outputs are among those of `*outputs` (the first, and how many), which loop of the root it is, its
 * number, its borders, and how many numbers it hands to its turns: they follow. The state is that before the next turn
 * only where no turn was new. */
EXPORT int64_t chatmill_replay_turns(replayer *r, int64_t record, const int32_t *classes, int64_t messages,
                                     const rendering *one, int64_t watched, int64_t limit, int64_t *found,
                                     const output **outputs)
{
    r->classes = classes;
    r->messages = messages;
    r->record = record;
    r->serial++;
    r->outputs.count = r->space_count = r->depth = 0;
    r->walks = r->is_too_long = 0;
    r->is_keyed = 1;
    r->open = NULL;
    r->count = one->count;
    r->probe = NO_PROBE;
    r->watched = watched;
    r->limit = limit;
    r->turns = -1;
    r->begin = r->is_over = r->given_count = 0;
    int breaks = 0;
    walk(r, one->table, one->reply, -1, NULL, 0, &breaks);
    const int64_t of_turns[] = {r->is_over, r->is_keyed, r->begin, r->outputs.count - r->begin, r->watched,
                                r->loop,    r->start,    r->stop,  r->given_count};
    memcpy(found, of_turns, sizeof of_turns);
    memcpy(found + sizeof of_turns / sizeof *of_turns, r->given, (size_t)r->given_count * sizeof *r->given);
    r->watched = NO_LOOP;
    *outputs = r->outputs.data;
    return r->is_too_long ? TOO_LONG : r->turns;
}

/* The values in namespaces after `chatmill_replay_turns`: the namespace, the name, the recipe, who made it, and its
 * numbers. Returns how many there are; `found` has the number of namespaces. */
EXPORT int64_t chatmill_state(const replayer *r, int64_t *rows, int64_t *found)
{
    int64_t count = 0;
    for (int32_t space = 0; space < r->space_count; space++) {
        for (int32_t name = 0; name < MAX_NAMES; name++) {
            const value *v = &r->spaces[space][name];
            if (v->recipe < 0) continue;
            int64_t *row = rows + (4 + MAX_NUMBERS) * count++;
            row[0] = space, row[1] = name, row[2] = v->recipe, row[3] = v->own;
            memcpy(row + 4, v->numbers, sizeof v->numbers);
        }
    }
    *found = r->space_count;
    return count;
}
