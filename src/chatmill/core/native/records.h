/* Records: messages in a list, a system text before them, and what is said about them. */

#define MAX_REPEATED 2 /* lists of a record that may repeat its answer */
#define MAX_TURNS 8    /* messages that are fields of a record */
#define MAX_JOINED 4   /* fields of one of them */

typedef struct {
    place at;
    int64_t length;
    int holds; /* whether there is something in it */
} other_key;

typedef struct {
    range id, source, tools, listed, options, system;
    range sampled, sent, logprobs, finish; /* of the call that the record is; a prompt may be that of listed calls */
    int lists;                               /* of messages */
    place answer, answer_end;                /* as it is written */
    place repeated[MAX_REPEATED], repeated_end[MAX_REPEATED]; /* lists that are to be written like the answer */
    int repeated_count;
    range turns[MAX_TURNS][MAX_JOINED];
    unsigned seen;
    other_key others[MAX_OTHER_KEYS];
    int other_count;
} record_parts;

/* A key that means nothing here, from after its opening quote; one with an escape, or that was there, is declined. */
static place unknown_key(const scanner *s, place p, record_parts *r)
{
    int64_t length;
    const place begin = p;
    if (!(p = string(s, p, &length)) || length != p - 1 - begin || r->other_count == MAX_OTHER_KEYS) return NULL;
    for (int i = 0; i < r->other_count; i++) {
        if (r->others[i].length == length && !memcmp(r->others[i].at, begin, (size_t)length)) return NULL;
    }
    r->others[r->other_count++] = (other_key){begin, length, 1};
    return after(s, p, ':');
}

/* Notes the fields of a record that mean nothing and hold something. */
static void note_unused(scanner *s, int64_t line, const record_parts *r)
{
    columns *out = s->out;
    for (const other_key *key = r->others, *end = key + r->other_count; key < end; key++) {
        if (key->holds && s->at.unused < out->unused_capacity) {
            out->unused[s->at.unused++] = (unused_field){line, key->at - s->data, key->length};
        }
    }
}

/* The id of a record: a text, or a whole number as it is written. */
static place record_id(scanner *s, place p, range *found)
{
    if (p == s->stop || (*p != '-' && (*p < '0' || *p > '9'))) return text_or_null(s, p, found);
    const place begin = p;
    if (!(p = number(s, p)) || IS(s, begin, "-0")) return NULL;
    for (place c = begin; c < p; c++) {
        if (*c != '-' && (*c < '0' || *c > '9')) return NULL;
    }
    found->start = s->at.text;
    found->length = p - begin;
    return keep(s, begin, found->length) ? p : NULL;
}

/* The source of a record; one that was met lately is not kept a second time. */
static place source(scanner *s, place p, range *found)
{
    if (!(p = text_or_null(s, p, found)) || found->length == 0) return NULL;
    for (int64_t i = 0; i < KNOWN_SOURCES && i < s->source_count; i++) {
        const range known = s->known_sources[i];
        const uint8_t *text = s->out->text;
        if (known.length == found->length && !memcmp(text + known.start, text + found->start, (size_t)known.length)) {
            s->at.text = found->start;
            *found = known;
            break;
        }
    }
    return p;
}

/* Tool definitions as lines, at the end of the JSON that is written so far. */
static place tool_lines(scanner *s, place p, range *lines)
{
    columns *out = s->out;
    writer w = {out->json + s->at.json, out->json + out->json_capacity};
    if (p == s->stop || *p != '[' || !(p = listed(s, p + 1, &w))) return NULL;
    lines->start = s->at.json;
    lines->length = w.at - (out->json + s->at.json);
    s->at.json += lines->length;
    return p;
}

/* The tools of a record: their range in the data, and where that can be done their lines. A text with such a list is
 * read where that can be done, and else declined. */
static place tools(scanner *s, place p, range *found, range *lines)
{
    const place begin = p, stop = s->stop;
    if (IS(s, p, "null")) return p + 4;
    if (p < stop && *p == '"') {
        range text;
        if (!(p = text_or_null(s, p, &text))) return NULL;
        if (!text.length) return p;
        s->stop = s->out->text + s->at.text;
        const place inner = s->out->text + text.start, end = tool_lines(s, space(s, inner), lines);
        const int is_all = end && space(s, end) == s->stop;
        s->stop = stop;
        s->at.text = text.start;
        return is_all ? p : NULL;
    }
    if (p == stop || *p != '[') return NULL;
    const place end = tool_lines(s, p, lines);
    p = end ? end : passed_value(s, p, 2);
    if (p) *found = (range){begin - s->data, p - begin};
    return p;
}

/* A number that a record says about its answers; null is none. */
static place score_of(scanner *s, place p, int which)
{
    columns *out = s->out;
    char text[MAX_NUMBER + 1], *read;
    if (IS(s, p, "null")) return p + 4;
    const place begin = p, first = p < s->stop && *p == '-' ? p + 1 : p;
    if (first == s->stop || *first < '0' || *first > '9' || !(p = number(s, p))) return NULL;
    memcpy(text, begin, (size_t)(p - begin));
    text[p - begin] = 0;
    const double value = strtod(text, &read);
    if (*read || s->at.scores >= out->score_capacity) return NULL; /* another decimal point in this locale */
    out->scores[s->at.scores++] = (score){out->lines, which, value};
    return p;
}

/* A list of messages, or a text that somebody says; one message where it is an answer. */
static place said_by(scanner *s, place p, uint8_t role)
{
    if (p == s->stop) return NULL;
    if (*p == '{') return role == ASSISTANT ? message(s, space(s, p + 1)) : NULL;
    if (*p != '"') return objects(s, p, message);
    message_parts m = no_parts(role);
    if (!(p = text_or_null(s, p, &m.content))) return NULL;
    if (role == USER && !m.content.length) return p;
    if (s->at.messages >= s->out->message_capacity) return NULL;
    return ended(s, s->at.messages++, 1, &m) ? p : NULL;
}

static place record_field(scanner *s, place p, const name *key, record_parts *r)
{
    switch (key->meaning) {
    case CALLS:
        s->is_call = 1;
        if (IS(s, p, "null")) return p + 4; /* fall through */
    case LIST: return r->lists++ ? NULL : objects(s, p, message);
    case ANSWER:
        r->answer = p;
        return r->lists++ ? NULL : (r->answer_end = said_by(s, p, ASSISTANT));
    case REPEATED:
        if (is_nothing(s, p)) return passed_value(s, p, 2);
        if (*p != '[' || r->repeated_count == MAX_REPEATED) return NULL;
        r->repeated[r->repeated_count] = p;
        return r->repeated_end[r->repeated_count++] = passed_value(s, p, 2);
    case QUESTION:
        if (IS(s, p, "null")) return p + 4;
        return r->lists++ ? NULL : said_by(s, p, USER);
    case ONLY_NULL: return IS(s, p, "null") ? p + 4 : NULL;
    case ID: return record_id(s, p, &r->id);
    case SOURCE: return source(s, p, &r->source);
    case TOOLS: return tools(s, p, &r->tools, &r->listed);
    case OPTIONS:
        r->options.length = ABSENT;
        if (IS(s, p, "null")) return p + 4;
        if (p == s->stop || *p != '{' || !(p = rewritten(s, p, &r->options))) return NULL;
        if (r->options.length == 2) r->options.length = ABSENT; /* no options are none */
        return p;
    case SYSTEM_TEXT: return text_or_null(s, p, &r->system);
    case OWN_CALL + TOKEN_IDS: return s->is_call = 1, numbers(s, p, TOKEN_IDS, &r->sampled);
    case OWN_CALL + PROMPT_TOKEN_IDS: return numbers(s, p, PROMPT_TOKEN_IDS, &r->sent);
    case OWN_CALL + LOGPROBS: return numbers(s, p, LOGPROBS, &r->logprobs);
    case OWN_CALL + FINISH_REASON: return text_or_null(s, p, &r->finish);
    case EMPTY: return is_nothing(s, p) ? passed_value(s, p, 2) : NULL;
    default:
        if (key->meaning < TURN) return score_of(s, p, key->meaning - SCORE);
        if (key->meaning >= TURN + MAX_TURNS * MAX_JOINED) return NULL;
        return text_or_null(s, p, &r->turns[(key->meaning - TURN) / MAX_JOINED][(key->meaning - TURN) % MAX_JOINED]);
    }
}

/* Makes room for a message before those of the record, which come after those of `before`. */
static int shift_messages(scanner *s, const counts *before)
{
    columns *out = s->out;
    const int64_t first = before->messages, count = s->at.messages - first;
    if (s->at.messages >= out->message_capacity) return 0;
    memmove(out->roles + first + 1, out->roles + first, (size_t)count);
    int64_t *const columns_of[] = {out->contents.starts, out->contents.lengths, out->reasoning.starts,
                                   out->reasoning.lengths};
    for (int i = 0; i < 4; i++) {
        memmove(columns_of[i] + first + 1, columns_of[i] + first, (size_t)count * sizeof(int64_t));
    }
    memmove(out->call_offsets + first + 1, out->call_offsets + first, (size_t)(count + 1) * sizeof(int64_t));
    for (int64_t i = before->rares; i < s->at.rares; i++) out->rare[i].message++;
    for (int64_t i = before->weights; i < s->at.weights; i++) out->weights[i].message++;
    for (int64_t i = before->extras; i < s->at.extras; i++) out->extras[i].message++;
    s->at.messages++;
    return 1;
}

/* The system text of a record as a message, before those of its list; 0 where it must have a list and has none. */
static int place_system(scanner *s, const record_parts *r, const counts *before)
{
    columns *out = s->out;
    const int64_t first = before->messages;
    if (!r->lists && !s->is_optional) return 0;
    if (r->system.length <= 0) return 1;
    if (!shift_messages(s, before)) return 0;
    out->roles[first] = SYSTEM;
    set_text(&out->contents, first, r->system);
    set_text(&out->reasoning, first, (range){0, ABSENT});
    out->call_offsets[first + 1] = out->call_offsets[first];
    return 1;
}

/* The call that a record is as a message, or the prompt of the record for the calls of its list that have none; 0 where
 * something is missing. */
static int place_calls(scanner *s, const record_parts *r, const counts *before)
{
    columns *out = s->out;
    const int64_t first = before->messages, rares = s->at.rares;
    if (!r->lists) {
        if (s->at.messages >= out->message_capacity || r->sampled.length < 0) return 0;
        const range none = {0, ABSENT};
        s->at.messages++;
        out->roles[first] = ASSISTANT;
        set_text(&out->contents, first, none);
        set_text(&out->reasoning, first, none);
        out->call_offsets[first + 1] = s->at.calls;
        if (!is_sampled_well(r->sampled, r->sent, r->logprobs) || !add_rare(s, first, TOKEN_IDS, r->sampled)
            || !add_rare(s, first, LOGPROBS, r->logprobs) || !add_rare(s, first, FINISH_REASON, r->finish)) {
            return 0;
        }
    } else if (r->sampled.length >= 0 || r->logprobs.length >= 0 || r->finish.length >= 0) {
        return 0;
    }
    for (int64_t number = first, at = before->rares; number < s->at.messages; number++) {
        int has_prompt = 0;
        for (; at < rares && out->rare[at].message <= number; at++) {
            has_prompt |= out->rare[at].field == PROMPT_TOKEN_IDS;
        }
        if (!has_prompt && (r->sent.length < 0 || !add_rare(s, number, PROMPT_TOKEN_IDS, r->sent))) return 0;
    }
    return 1;
}

/* The text of a message that is in fields of a record: of the first one, and of the others that are not empty, each on a
 * line of its own. One without a length stands for a record to be declined. */
static range turn_text(scanner *s, const range *fields)
{
    const place text = s->out->text;
    range found = fields[0];
    int is_joined = 0;
    for (int i = 1; i < MAX_JOINED && found.length >= 0; i++) {
        if (fields[i].length <= 0) continue;
        if (!is_joined) {
            const range first = found;
            found.start = s->at.text;
            if (!keep(s, text + first.start, first.length)) return (range){0, ABSENT};
            is_joined = 1;
        }
        if (!keep(s, (place) "\n", 1) || !keep(s, text + fields[i].start, fields[i].length)) return (range){0, ABSENT};
        found.length = s->at.text - found.start;
    }
    return found;
}

/* The messages that are fields of a record; 0 where one is missing. */
static int place_turns(scanner *s, record_parts *r)
{
    if (s->turns > MAX_TURNS || s->turns > s->names->of_role.count) return 0;
    for (int i = 0; i < s->turns; i++) {
        message_parts m = no_parts(s->names->of_role.names[i].meaning);
        m.content = turn_text(s, r->turns[i]);
        if (m.content.length < 0 || s->at.messages >= s->out->message_capacity) return 0;
        if (!ended(s, s->at.messages++, 1, &m)) return 0;
    }
    r->lists = 1;
    return 1;
}

/* Whether the lists that repeat the answer are written like it. */
static int repeats_answer(const record_parts *r)
{
    for (int i = 0; i < r->repeated_count; i++) {
        const ptrdiff_t size = r->repeated_end[i] - r->repeated[i];
        if (!r->answer || size != r->answer_end - r->answer || memcmp(r->repeated[i], r->answer, (size_t)size)) return 0;
    }
    return 1;
}

/* The members of a record and its messages. */
static place members(scanner *s, place p, record_parts *parts)
{
    const counts before = s->at;
    name_table *table = &s->names->of_record;
    const range none = {0, ABSENT};
    name *last = &table->start;
    parts->id = parts->source = parts->tools = parts->listed = parts->options = parts->system = none;
    parts->sampled = parts->sent = parts->logprobs = parts->finish = none;
    parts->lists = parts->other_count = parts->repeated_count = s->is_call = 0;
    parts->answer = NULL;
    parts->seen = 0;
    for (int i = 0; i < s->turns && i < MAX_TURNS; i++) {
        for (int k = 0; k < MAX_JOINED; k++) parts->turns[i][k] = none;
    }
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        const name *key = name_at(s, p, table, &last);
        if (key) {
            if (!(p = noted(s, p + key->length, key->bit, &parts->seen))) return NULL;
            p = record_field(s, p, key, parts);
        } else if ((p = unknown_key(s, p, parts))) {
            if (p < s->stop && *p == '[' && speaks_of_training(s, parts->others[parts->other_count - 1].at)) return NULL;
            parts->others[parts->other_count - 1].holds = !is_nothing(s, p);
            p = passed_value(s, p, 2);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    if (!repeats_answer(parts) || (s->turns && !place_turns(s, parts))) return NULL;
    return (s->is_call ? place_calls : place_system)(s, parts, &before) ? p : NULL;
}

/* One record. */
static place record(scanner *s, place p)
{
    columns *out = s->out;
    record_parts parts;
    const int64_t number = out->lines;
    if (number >= out->line_capacity || !(p = members(s, p, &parts))) return NULL;
    out->lines++;
    set_text(&out->ids, number, parts.id);
    set_text(&out->sources, number, parts.source);
    set_text(&out->tools, number, parts.tools);
    set_text(&out->listed, number, parts.listed);
    set_text(&out->options, number, parts.options);
    out->message_offsets[number + 1] = s->at.messages;
    note_unused(s, number, &parts);
    return p;
}
