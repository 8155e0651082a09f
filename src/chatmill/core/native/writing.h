/* Plans written: which answers each document of a conversation trains, and the stretches of items that it becomes
 * (writer.py).
 *
 * Outputs become stretches by a machine of states; a state is what earlier outputs leave to the next one. What is not
 * known is asked for by leaving, and kept. The reference is the Python that is asked: `DocumentWriter` and `Stretches`. */

enum { WRITTEN, NEW_SEGMENT, NEW_MOVE, NEW_ANSWER, NEW_HELD, NOT_HERE }; /* how writing ends */
enum { NOT_THERE = -1, NEVER = -2, MAX_OWNERS = 3 }; /* NEVER: only Python makes this stretch, or marks this answer */
/* Added to the voice of an answer that F has in another form: CHANGED as it is trained in that form, and SILENT once it has
 * no prompt any more. What ends it is trained even then. ENDING is part of the context of an output that begins with that end. */
enum { CHANGED = 1 << 30, SILENT = 1 << 29, ENDING = 1 << 30 };
enum { NO_STOP = -1 };

/* Whose texts a segment has, counted from its own message. */
typedef struct {
    int32_t first, owners;
    uint8_t is_known, shows_tools, begins_with_end, ends_with_end;
} written_segment;

/* Pairs of an output, counted from the first of an answer, and what is trained of it. */
typedef struct {
    int64_t first, count; /* in `numbers` */
} mark_list;

/* An answer in A(i): the output that it ends in, counted from its first, its marks, those at the end of a document, and
 * what it is in a document that does not train it: a number that stands where marks do, or 0 if only Python knows. `stop`
 * is a segment that is added where a document ends with the answer, and that it ends in; NO_STOP for none. */
typedef struct {
    int64_t end, marks, cut, voice, stop;
} known_answer;

typedef struct {
    int32_t stretch, state;
} move;

typedef struct {
    list segments, numbers, moves, mark_lists, answers;
    list entries, sizes, row_of, marks_of, marks, row; /* of the conversation that is written */
    map known, answer_numbers, held;              /* held: the marks of an answer in a longer rendering, by both keys */
} document_writer;

EXPORT void *chatmill_writer(void)
{
    return calloc(1, sizeof(document_writer));
}

EXPORT void chatmill_writer_free(document_writer *w)
{
    if (!w) return;
    list *const lists[] = {&w->segments, &w->numbers, &w->moves,  &w->mark_lists, &w->answers,
                           &w->entries,  &w->sizes,   &w->row_of, &w->marks_of,   &w->marks,   &w->row};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) free(lists[i]->data);
    free(w->known.entries), free(w->answer_numbers.entries), free(w->held.entries);
    free(w);
}

/* Say what is known of a segment: its owners, whether it shows tools, and whether it begins or ends with an end of answers. */
EXPORT int64_t chatmill_writer_segment(document_writer *w, int64_t segment, const int64_t *numbers, int64_t owners,
                                       int64_t shows_tools, int64_t begins_with_end, int64_t ends_with_end)
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
    ITEM(written_segment, w->segments, segment) =
        (written_segment){(int32_t)first, (int32_t)owners, 1, (uint8_t)shows_tools, (uint8_t)begins_with_end, (uint8_t)ends_with_end};
    return 0;
}

/* Keep what a segment becomes in a context, after a state that is so many messages away. */
EXPORT int64_t chatmill_writer_move(document_writer *w, int64_t segment, int64_t context, int64_t state, int64_t by, int64_t stretch,
                                    int64_t next)
{
    move *made = appended(&w->moves, 1, sizeof *made);
    if (!made) return -1;
    *made = (move){(int32_t)stretch, (int32_t)next};
    return put_in(&w->known, segment, (state << 32) | (uint32_t)by, context, w->moves.count - 1) ? 0 : -1;
}

/* Keep marks; their number. */
EXPORT int64_t chatmill_writer_marks(document_writer *w, const int64_t *pairs, int64_t count)
{
    const int64_t first = w->numbers.count;
    int32_t *place = appended(&w->numbers, 2 * count, sizeof *place);
    mark_list *made = place ? appended(&w->mark_lists, 1, sizeof *made) : NULL;
    if (!made) return -1;
    for (int64_t i = 0; i < 2 * count; i++) place[i] = (int32_t)pairs[i];
    *made = (mark_list){first, count};
    return w->mark_lists.count - 1;
}

/* Keep what is known of an answer by its key; `marks` is NEVER where only Python writes it. */
EXPORT int64_t chatmill_writer_answer(document_writer *w, int64_t key, int64_t end, int64_t marks, int64_t cut, int64_t voice,
                                      int64_t stop)
{
    known_answer *made = appended(&w->answers, 1, sizeof *made);
    if (!made) return -1;
    *made = (known_answer){end, marks, cut, voice, stop};
    return put_in(&w->answer_numbers, key, 0, 0, w->answers.count - 1) ? 0 : -1;
}

/* Keep the marks of an answer in a longer rendering; NOT_THERE or NEVER in place of them. */
EXPORT int64_t chatmill_writer_held(document_writer *w, int64_t key, int64_t more, int64_t marks)
{
    return put_in(&w->held, key, more, 0, marks) ? 0 : -1;
}

/* How many answers are known, in all renderings. */
EXPORT int64_t chatmill_writer_size(const document_writer *w)
{
    return w->answer_numbers.count + w->held.count;
}

static const written_segment *known_segment(const document_writer *w, int32_t segment)
{
    const written_segment *s = segment < w->segments.count ? &ITEM(written_segment, w->segments, segment) : NULL;
    return s && s->is_known ? s : NULL;
}

static const known_answer *known_of(const document_writer *w, const answer *one)
{
    return &ITEM(known_answer, w->answers, looked_up(&w->answer_numbers, one->key, 0, 0));
}

/* Have messages that have spoken be trained no more where they are changed, since they have no prompt after a text of
 * another one: the texts of `last` were written before, and those of `next` follow. */
static void end_changed(const document_writer *w, int64_t *voices, output last, output next)
{
    const written_segment *before = known_segment(w, last.segment), *after = known_segment(w, next.segment);
    const int32_t *owners = &ITEM(int32_t, w->numbers, before->first);
    const int64_t only = after->owners == 1 ? next.base + ITEM(int32_t, w->numbers, after->first) : -1;
    for (int32_t k = 0; k < before->owners; k++) {
        const int64_t message = last.base + owners[k];
        const int is_over = message != only && (last.base < 0 || !owners[k]);
        if (is_over && voices[message] & CHANGED) voices[message] |= SILENT;
    }
}

/* Write outputs, with the marks in `w->marks`: pairs of an output and what is trained of it. `voices` has, for each
 * message, what its answer is where it has no marks. Entries are pairs of a stretch and a message. */
static int64_t write_row(document_writer *w, const conversation *c, int64_t *voices, const output *outputs, int64_t count,
                         int64_t *shows_tools, int64_t *found)
{
    const int64_t *marks = w->marks.data, mark_count = w->marks.count / 2, before_row = w->entries.count;
    int64_t marked = 0, seen = -1, state = 0, before = 0, spoken = -1, ending = 0;
    for (int64_t i = 0; i <= count; i++) {
        const int is_end = i == count;
        const output o = is_end ? (output){-1, -1} : outputs[i];
        int64_t mark = 0, at = before, context = is_end ? 0 : ending;
        ending = 0;
        const written_segment *s = NULL;
        if (!is_end) {
            if (marked < mark_count && marks[2 * marked] == i) mark = marks[2 * marked++ + 1];
            if (marked < mark_count && marks[2 * marked] <= i) return NOT_HERE;
            s = known_segment(w, o.segment);
            if (!s) {
                found[0] = o.segment;
                return NEW_SEGMENT;
            }
            if (s->owners > MAX_OWNERS) return NOT_HERE;
            const int32_t *owners = &ITEM(int32_t, w->numbers, s->first);
            at = o.base < 0 && !s->owners ? (seen > 0 ? seen : 0) : o.base;
            int64_t voiced = -1, voice = 0;
            for (int32_t k = 0; k < s->owners; k++) {
                const int64_t owner = o.base + owners[k];
                if (owner < 0 || owner >= c->messages) return NOT_HERE;
                context |= (int64_t)c->roles[owner] << 4 * k;
                if (mark || !voices[owner]) continue;
                if (voice) return NOT_HERE; /* texts of two answers */
                voiced = owner;
                voice = voices[owner];
            }
            if (at >= c->messages) return NOT_HERE;
            if (voice) {
                const written_segment *next = i + 1 < count ? known_segment(w, outputs[i + 1].segment) : s;
                if (!next) {
                    found[0] = outputs[i + 1].segment;
                    return NEW_SEGMENT;
                }
                const int64_t is_ended = i + 1 < count && next->begins_with_end, is_changed = (voice & CHANGED) != 0;
                mark = (voice & (SILENT - 1)) + is_ended + (is_changed && !(voice & SILENT) ? 2 : 0);
                if (is_ended && is_changed && voiced == at && !s->ends_with_end) {
                    if (outputs[i + 1].base != at + 1) return NOT_HERE;
                    ending = ENDING;
                }
            }
            if (at >= 0) context |= (int64_t)c->roles[at] << 12;
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
            int64_t *entry = appended(&w->entries, 2, sizeof *entry);
            if (!entry) return NOT_HERE;
            entry[0] = m.stretch;
            entry[1] = at;
        }
        if (is_end) break;
        state = m.state;
        before = at;
        *shows_tools |= s->shows_tools;
        if (s->owners) {
            if (spoken >= 0) end_changed(w, voices, outputs[spoken], o);
            spoken = i;
        }
        const int32_t *owners = &ITEM(int32_t, w->numbers, s->first);
        if (!s->owners && o.base >= 0) seen = o.base;
        for (int32_t k = 0; k < s->owners; k++)
            if (!k || o.base + owners[k] > seen) seen = o.base + owners[k];
    }
    int64_t *size = appended(&w->sizes, 1, sizeof *size);
    if (!size) return NOT_HERE;
    *size = (w->entries.count - before_row) / 2;
    return WRITTEN;
}

/* Find the marks of an answer in a longer rendering, or NOT_THERE; `found` has what is asked for. */
static int64_t find_held(const document_writer *w, const answer *one, parted at, int64_t *marks, int64_t *found)
{
    const known_answer *own = known_of(w, one);
    *marks = own->marks;
    if (at.same > one->first + own->end) return WRITTEN; /* not with a stop that is added: that is after all of A(i) */
    if (at.more == NO_KEY) return NOT_HERE;
    const int64_t key = (at.same > 1 ? at.same : 1) >= one->first ? one->key : NO_KEY; /* they part before the answer */
    *marks = looked_up(&w->held, key, at.more, 0);
    if (*marks == NEVER) return NOT_HERE;
    if (*marks != NO_CHILD) return WRITTEN;
    found[2] = key;
    found[3] = at.more;
    return NEW_HELD;
}

/* Add the marks of an answer to those of the row that is written next. */
static int add_marks(document_writer *w, const answer *one, int64_t number)
{
    const mark_list listed = ITEM(mark_list, w->mark_lists, number);
    int64_t *pairs = appended(&w->marks, 2 * listed.count, sizeof *pairs);
    if (!pairs) return 0;
    for (int64_t i = 0; i < listed.count; i++) {
        pairs[2 * i] = one->first + ITEM(int32_t, w->numbers, listed.first + 2 * i);
        pairs[2 * i + 1] = ITEM(int32_t, w->numbers, listed.first + 2 * i + 1);
    }
    return 1;
}

enum { IN_WHOLE = -1, NO_ROW = -2 };

/* Find the answers that F has, and their marks; the others have no row yet. */
static int64_t find_in_whole(const document_writer *w, const conversation *c, int64_t *row_of, int64_t *marks_of, int64_t *found)
{
    for (int64_t i = 0; i < c->answer_count; i++) {
        const answer *one = &c->answers[i];
        found[0] = i;
        found[1] = IN_WHOLE;
        if (one->key == NO_KEY || one->hidden != -1) return NOT_HERE;
        if (looked_up(&w->answer_numbers, one->key, 0, 0) == NO_CHILD) return NEW_ANSWER;
        if (known_of(w, one)->marks == NEVER) return NOT_HERE;
        const int64_t ended = find_held(w, one, (parted){one->same, one->more}, &marks_of[i], found);
        if (ended != WRITTEN) return ended;
        row_of[i] = marks_of[i] == NOT_THERE ? NO_ROW : IN_WHOLE;
        if (one->apart >= 0 && row_of[i] == IN_WHOLE) return NOT_HERE;
    }
    return WRITTEN;
}

/* Find rows for the others. A row is A(i) of an answer that no later row has, and trains what it has of those before. */
static int64_t find_rows(const document_writer *w, replayer *r, const conversation *c, int64_t *row_of, int64_t *marks_of,
                         int64_t *found)
{
    for (int64_t last = c->answer_count - 1; last >= 0; last--) {
        if (row_of[last] != NO_ROW) continue;
        row_of[last] = last;
        marks_of[last] = known_of(w, &c->answers[last])->cut;
        for (int64_t i = 0; i < last; i++) {
            if (row_of[i] != NO_ROW) continue;
            const parted at = parting(r, c, &c->answers[i], &c->renderings[c->answers[last].ended]);
            found[0] = i;
            found[1] = last;
            const int64_t ended = find_held(w, &c->answers[i], at, &marks_of[i], found);
            if (ended != WRITTEN) return ended;
            if (marks_of[i] != NOT_THERE) row_of[i] = last;
        }
    }
    return WRITTEN;
}

/* Write one document, whose answers have `row` for a row: as many outputs of a rendering. `ending` is the answer that it
 * may end with, whose stop is added. */
static int64_t write_document(document_writer *w, const conversation *c, int64_t row, const rendering *from, int64_t count,
                              const answer *ending, int64_t *shows_tools, int64_t *stops, int64_t *found)
{
    const int64_t *row_of = w->row_of.data, size = from->stop - from->first;
    int64_t *marks_of = w->marks_of.data, *voices = marks_of + c->answer_count;
    w->marks.count = *shows_tools = 0;
    const output *outputs = c->outputs + from->first;
    const int64_t stop = ending ? known_of(w, ending)->stop : NO_STOP;
    if (stop == NO_STOP ? count > size : count != size + 1) return NOT_HERE;
    if (stop != NO_STOP) {
        w->row.count = 0;
        output *copy = appended(&w->row, count, sizeof *copy);
        if (!copy) return NOT_HERE;
        memcpy(copy, outputs, (size_t)(count - 1) * sizeof *copy);
        copy[count - 1] = (output){(int32_t)stop, (int32_t)ending->message};
        outputs = copy;
        ++*stops;
    }
    for (int64_t i = 0; i < c->answer_count; i++)
        if (row_of[i] == row && !add_marks(w, &c->answers[i], marks_of[i])) return NOT_HERE;
    return write_row(w, c, voices, outputs, count, shows_tools, found);
}

/* Write all documents of a conversation: the rows of answers that F does not have, and F if it has one, if there are no
 * others, or if `has_whole` says so; with `in_one`, nothing but F, in which answers that are apart are not trained. Entries and the number of those of each document are in
 * `*entries` and `*sizes` until the next call. `found` has the numbers of documents, of entries, and of answers that F does
 * not have, whether the last document shows tools, and the numbers of stops that were added and of answers that are not trained; or what is asked: an answer and
 * that of the longer rendering, -1 for F, with both keys; a segment; or an output: its segment and message, what is trained,
 * the last message that was seen, the state, the message before, and the context. */
EXPORT int64_t chatmill_write(document_writer *w, replayer *r, const conversation *c, int64_t has_whole, int64_t in_one,
                              const int64_t **entries, const int64_t **sizes, int64_t *found)
{
    r->classes = c->classes;
    r->messages = c->messages;
    w->entries.count = w->sizes.count = w->row_of.count = w->marks_of.count = 0;
    int64_t *row_of = appended(&w->row_of, c->answer_count, sizeof *row_of);
    int64_t *marks_of = appended(&w->marks_of, c->answer_count + c->messages, sizeof *marks_of), *voices;
    if (!row_of || !marks_of) return NOT_HERE;
    int64_t ended = find_in_whole(w, c, row_of, marks_of, found), changed = 0, untrained = 0, shows_tools = 0, stops = 0;
    if (ended != WRITTEN) return ended;
    voices = marks_of + c->answer_count;
    memset(voices, 0, (size_t)c->messages * sizeof *voices);
    for (int64_t i = 0; i < c->answer_count; i++) {
        const int64_t voice = known_of(w, &c->answers[i])->voice, is_apart = c->answers[i].apart >= 0;
        const int64_t is_changed = row_of[i] == NO_ROW && !(in_one && is_apart);
        changed += is_changed;
        untrained += in_one && is_apart;
        voices[c->answers[i].message] = voice && in_one && is_changed ? voice | CHANGED : voice;
    }
    if (!in_one) ended = find_rows(w, r, c, row_of, marks_of, found);
    for (int64_t i = 0; i < c->answer_count && ended == WRITTEN; i++) {
        const answer *one = &c->answers[i];
        if (row_of[i] != i) continue;
        const int64_t size = one->first + known_of(w, one)->end + 1;
        ended = write_document(w, c, i, &c->renderings[one->ended], size, one, &shows_tools, &stops, found);
    }
    if (ended == WRITTEN && (has_whole || in_one || !changed || changed < c->answer_count)) {
        const int64_t whole = c->rendering_count - 1, last = c->answer_count - 1;
        const rendering *f = &c->renderings[whole];
        const answer *ending = last >= 0 && c->answers[last].ended == whole ? &c->answers[last] : NULL;
        const int64_t has_stop = ending && known_of(w, ending)->stop != NO_STOP;
        ended = write_document(w, c, IN_WHOLE, f, f->stop - f->first + has_stop, ending, &shows_tools, &stops, found);
    }
    if (ended != WRITTEN) return ended;
    *entries = w->entries.data;
    *sizes = w->sizes.data;
    const int64_t counts[] = {w->sizes.count, w->entries.count / 2, changed, shows_tools, stops, untrained};
    memcpy(found, counts, sizeof counts);
    return WRITTEN;
}
