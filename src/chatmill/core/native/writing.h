/* Sequences written: the outputs of a rendering become stretches of items, by what comes before them (writer.py).
 *
 * It is a machine of states; a state is what earlier outputs leave to the next one. What it does not know is asked for
 * by leaving, and kept. Its reference is the Python that is asked: `SequenceWriter` and `Stretches`. */

enum { WRITTEN, NEW_SEGMENT, NEW_MOVE, NOT_HERE }; /* how writing ends */
enum { NEVER = -2, MAX_OWNERS = 3 };               /* the stretch of a move that only Python makes */

/* Whose texts a segment has, counted from its own message. */
typedef struct {
    int32_t first, owners;
    uint8_t is_known, shows_tools;
} written_segment;

typedef struct {
    int32_t stretch, state;
} move;

typedef struct {
    list segments, numbers, moves;
    map known;
} sequence_writer;

EXPORT void *chatmill_writer(void)
{
    return calloc(1, sizeof(sequence_writer));
}

EXPORT void chatmill_writer_free(sequence_writer *w)
{
    if (!w) return;
    free(w->segments.data), free(w->numbers.data), free(w->moves.data), free(w->known.entries);
    free(w);
}

/* Say what is known of a segment: its owners. */
EXPORT int64_t chatmill_writer_segment(sequence_writer *w, int64_t segment, const int64_t *numbers, int64_t owners,
                                       int64_t shows_tools)
{
    while (w->segments.count <= segment) {
        written_segment *s = appended(&w->segments, 1, sizeof *s);
        if (!s) return -1;
        memset(s, 0, sizeof *s);
    }
    const int64_t first = w->numbers.count;
    int32_t *place = appended(&w->numbers, owners, sizeof *place);
    if (!place) return -1;
    for (int64_t i = 0; i < owners; i++) place[i] = (int32_t)numbers[i];
    ITEM(written_segment, w->segments, segment) = (written_segment){(int32_t)first, (int32_t)owners, 1, (uint8_t)shows_tools};
    return 0;
}

/* Keep what a segment becomes in a context, behind a state that is so many messages away. */
EXPORT int64_t chatmill_writer_move(sequence_writer *w, int64_t segment, int64_t context, int64_t state, int64_t by, int64_t stretch,
                                    int64_t next)
{
    move *made = appended(&w->moves, 1, sizeof *made);
    if (!made) return -1;
    *made = (move){(int32_t)stretch, (int32_t)next};
    return put_in(&w->known, segment, (state << 32) | (uint32_t)by, context, w->moves.count - 1) ? 0 : -1;
}

/* Write the outputs of one conversation. `marks` are pairs of an output and what is trained of it. Entries are pairs of a
 * stretch and a message, one more than outputs at most. `found` has how many there are, and whether tools are shown; or
 * what is asked: a segment, its message, what is trained, the last message that was seen, the state, the message before,
 * and the context. */
EXPORT int64_t chatmill_write(sequence_writer *w, const uint8_t *roles, int64_t messages, const output *outputs,
                              int64_t count, const int64_t *marks, int64_t mark_count, int64_t *entries, int64_t *found)
{
    int64_t marked = 0, seen = -1, state = 0, before = 0, made = 0, tools = 0;
    for (int64_t i = 0; i <= count; i++) {
        const int is_end = i == count;
        const output o = is_end ? (output){-1, -1} : outputs[i];
        int64_t mark = 0, at = before, context = 0;
        const written_segment *s = NULL;
        if (!is_end) {
            if (marked < mark_count && marks[2 * marked] == i) mark = marks[2 * marked++ + 1];
            if (marked < mark_count && marks[2 * marked] <= i) return NOT_HERE;
            s = o.segment < w->segments.count ? &ITEM(written_segment, w->segments, o.segment) : NULL;
            if (!s || !s->is_known) {
                found[0] = o.segment;
                return NEW_SEGMENT;
            }
            if (s->owners > MAX_OWNERS) return NOT_HERE;
            const int32_t *owners = &ITEM(int32_t, w->numbers, s->first);
            at = o.base < 0 && !s->owners ? (seen > 0 ? seen : 0) : o.base;
            for (int32_t k = 0; k < s->owners; k++) {
                const int64_t owner = o.base + owners[k];
                if (owner < 0 || owner >= messages) return NOT_HERE;
                context |= (int64_t)roles[owner] << 4 * k;
            }
            if (at >= messages) return NOT_HERE;
            if (at >= 0) context |= (int64_t)roles[at] << 12;
            context |= (mark << 18) | (seen < 0 ? 1 << 17 : 0) | (o.base < 0 ? 1 << 16 : 0);
        }
        const int64_t number = looked_up(&w->known, o.segment, (state << 32) | (uint32_t)(at - before), context);
        if (number == NO_CHILD) {
            const int64_t asked[] = {o.segment, o.base, mark, seen, state, before, context};
            memcpy(found, asked, sizeof asked);
            return NEW_MOVE;
        }
        const move m = ITEM(move, w->moves, number);
        if (m.stretch == NEVER) return NOT_HERE;
        if (m.stretch >= 0) {
            entries[2 * made] = m.stretch;
            entries[2 * made++ + 1] = at;
        }
        if (is_end) break;
        state = m.state;
        before = at;
        tools |= s->shows_tools;
        const int32_t *owners = &ITEM(int32_t, w->numbers, s->first);
        if (!s->owners && o.base >= 0) seen = o.base;
        for (int32_t k = 0; k < s->owners; k++)
            if (!k || o.base + owners[k] > seen) seen = o.base + owners[k];
    }
    found[0] = made;
    found[1] = tools;
    return WRITTEN;
}
