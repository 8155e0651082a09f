/* Where the prompts and answers of one conversation part, as keys of what the rules found there: see answer_branches.py.
 *
 * P(i) and A(i) are looked at from the last fragment with text of a message that both begin with. The branch of an
 * answer is what both have from there on, as it is seen from message i. */

enum { OF_ROOT = 1 << 30, NO_CLASS = -1, IS_LIKE_WHOLE = 1, SHOWS_RECORD = 2 };

/* What is known of a segment, in the order of Python's columns. */
typedef struct {
    int32_t owners, first_owner, shows_record; /* how many messages it has text of, and the first, from its own */
} segment_facts;

/* What is seen of one fragment. */
typedef struct {
    int32_t segment, distance, class;
} seen;

typedef struct {
    int64_t first, shared;        /* the first fragment, and how many A(i) has in common with F */
    int64_t begin, middle, end;   /* where what is seen of P(i) begins, and that of A(i), and where it ends; -1: left out */
    int64_t flags;
} branch;

typedef struct {
    const output *outputs;
    const segment_facts *facts;
    const int32_t *classes;
    int64_t class_count;
    seen *room;
    int64_t size, capacity, flags;
} branch_writer;

/* What is seen of some fragments from a message; 0 if one has text of several messages or of one without a class, or if
 * there is no room. */
static int add_seen(branch_writer *w, int64_t from, int64_t until, int64_t message)
{
    for (int64_t i = from; i < until; i++) {
        const output one = w->outputs[i];
        const segment_facts *f = &w->facts[one.segment];
        if (f->owners > 1 || w->size == w->capacity) return 0;
        const int is_of_root = !f->owners && one.base == -1;
        const int32_t distance = is_of_root ? OF_ROOT : (int32_t)(one.base - message);
        const int64_t owner = (int64_t)one.base + f->first_owner;
        if (f->owners && (owner < 0 || owner >= w->class_count)) return 0;
        w->room[w->size++] = (seen){one.segment, distance, f->owners ? w->classes[owner] : NO_CLASS};
        if (f->shows_record) w->flags |= SHOWS_RECORD;
    }
    return 1;
}

/* Whether fragments have text of a message. */
static int have_text(const branch_writer *w, int64_t from, int64_t until)
{
    for (int64_t i = from; i < until; i++)
        if (w->facts[w->outputs[i].segment].owners) return 1;
    return 0;
}

/* The branches of `count` answers. Each has a line in `answers`: its message, and the lines of P(i) and A(i) among the
 * renderings. `last_places` has for each message the last fragment of F with text of it or of one before it; NULL if F
 * shows several messages in one fragment. Returns how much of the room is taken. */
EXPORT int64_t chatmill_branches(const rendering *renderings, const output *outputs, const segment_facts *facts,
                                 const int32_t *classes, int64_t class_count, const int64_t *last_places,
                                 const int64_t *answers, int64_t count, seen *room, int64_t capacity, branch *found)
{
    branch_writer w = {outputs, facts, classes, class_count, room, 0, capacity, 0};
    for (int64_t i = 0; i < count; i++) {
        const int64_t message = answers[3 * i];
        const rendering *prompt = &renderings[answers[3 * i + 1]], *ended = &renderings[answers[3 * i + 2]];
        branch *b = &found[i];
        *b = (branch){0, ended->same, -1, -1, -1, 0};
        if (prompt->ended != KNOWN || ended->ended != KNOWN || prompt->same == ended->same) continue;
        int64_t first = (prompt->same < ended->same ? prompt->same : ended->same) - 1;
        while (first > 0 && !facts[outputs[first].segment].owners) first--;
        b->first = first = first < 0 ? 0 : first;

        w.flags = 0;
        const int64_t begin = w.size;
        int is_whole = add_seen(&w, first, prompt->same, message);
        is_whole = is_whole && add_seen(&w, prompt->first + prompt->same, prompt->stop, message);
        const int64_t middle = w.size;
        is_whole = is_whole && add_seen(&w, first, ended->same, message);
        is_whole = is_whole && add_seen(&w, ended->first + ended->same, ended->stop, message);
        if (!is_whole) {
            w.size = begin;
            continue;
        }
        const int shows_more = have_text(&w, ended->first + ended->same, ended->stop);
        if (last_places && last_places[message] < ended->same && !shows_more) w.flags |= IS_LIKE_WHOLE;
        *b = (branch){first, ended->same, begin, middle, w.size, w.flags};
    }
    return w.size;
}

/* The fragments of F with text of each of `messages`, as they are seen from it, in the order of messages: those of
 * message k end at `ends[k]`. `last_places` gets what `chatmill_branches` takes. Returns 0 if a fragment has text of
 * several messages, or of none of these. */
EXPORT int64_t chatmill_shown(const output *outputs, int64_t count, const segment_facts *facts, int64_t messages,
                              output *shown, int64_t *ends, int64_t *last_places)
{
    memset(ends, 0, (size_t)messages * sizeof *ends);
    for (int64_t k = 0; k < messages; k++) last_places[k] = -1;
    for (int64_t i = 0; i < count; i++) {
        const segment_facts *f = &facts[outputs[i].segment];
        if (!f->owners) continue;
        const int64_t message = outputs[i].base + f->first_owner;
        if (f->owners > 1 || message < 0 || message >= messages) return 0;
        ends[message]++;
        last_places[message] = i;
    }

    /* where each message begins; it ends up where the message ends */
    int64_t begin = 0, last = -1;
    for (int64_t k = 0; k < messages; k++) {
        const int64_t size = ends[k];
        ends[k] = begin;
        begin += size;
        if (last_places[k] > last) last = last_places[k];
        last_places[k] = last;
    }
    for (int64_t i = 0; i < count; i++) {
        const segment_facts *f = &facts[outputs[i].segment];
        if (!f->owners) continue;
        const int64_t message = outputs[i].base + f->first_owner;
        shown[ends[message]++] = (output){outputs[i].segment, (int32_t)(outputs[i].base - message)};
    }
    return 1;
}
