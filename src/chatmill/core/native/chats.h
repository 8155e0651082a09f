/* Records of chats: messages with all their fields, and the records around them, under the names of a shape. */

/* Behind a key at `p` (behind its opening quote) of a level whose names never change; 0 where it is none of them. */
#define KEY(literal, bit)                                                                                              \
    if (IS(s, p, literal "\"")) {                                                                                      \
        p += sizeof(literal);                                                                                          \
        key = (bit);                                                                                                   \
    }

/* Behind the colon, with the key noted in `seen`; a second one, like an unknown one (0), is declined. */
static inline place noted(const scanner *s, place p, unsigned key, unsigned *seen)
{
    if (!key || (*seen & key)) return NULL;
    *seen |= key;
    return after(s, p, ':');
}

/* A value as JSON written anew, at the end of what is written so far. */
static place rewritten(scanner *s, place p, range *found)
{
    columns *out = s->out;
    uint8_t *const begin = out->json + s->at.json;
    writer w = {begin, out->json + out->json_capacity};
    if (!(p = dumped(s, p, 3, &w))) return NULL;
    found->start = s->at.json;
    found->length = w.at - begin;
    s->at.json += found->length;
    return p;
}

/* A copy at the end of the texts. */
static int keep(scanner *s, place text, int64_t length)
{
    if (s->out->text_capacity - s->at.text < length) return 0;
    memmove(s->out->text + s->at.text, text, (size_t)length);
    s->at.text += length;
    return 1;
}

/* Arguments: a text as it is, an object or a list as JSON. */
static place arguments(scanner *s, place p, range *found)
{
    if (p < s->stop && *p == '"') return text_or_null(s, p, found);
    if (p == s->stop || (*p != '{' && *p != '[')) return NULL;
    const int64_t written = s->at.json;
    range json;
    if (!(p = rewritten(s, p, &json))) return NULL;
    found->start = s->at.text;
    found->length = json.length;
    s->at.json = written;
    return keep(s, s->out->json + json.start, json.length) ? p : NULL;
}

enum { FUNCTION_NAME = 1, ARGUMENTS = 2 };

static place function(scanner *s, place p, int64_t call)
{
    columns *out = s->out;
    unsigned seen = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        range text;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("name", FUNCTION_NAME)
        else KEY("arguments", ARGUMENTS)
        if (!(p = noted(s, p, key, &seen))) return NULL;
        if (key == FUNCTION_NAME) {
            if (!(p = text_or_null(s, p, &text)) || text.length < 0) return NULL;
            set_text(&out->call_names, call, text);
        } else {
            if (!(p = arguments(s, p, &text))) return NULL;
            set_text(&out->call_arguments, call, text);
        }
        if ( !(p = separator(s, p, '}', &more))) return NULL;
    }
    return seen == (FUNCTION_NAME | ARGUMENTS) ? p : NULL;
}

enum { FUNCTION = 1, CALL_ID = 2, CALL_TYPE = 4 };

static place call(scanner *s, place p)
{
    columns *out = s->out;
    if (s->at.calls >= out->call_capacity) return NULL;
    unsigned seen = 0;
    range id = {0, ABSENT};
    for (int more = 1; more;) {
        unsigned key = 0;
        int64_t length;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("function", FUNCTION)
        else KEY("id", CALL_ID)
        else KEY("type", CALL_TYPE)
        if (!(p = noted(s, p, key, &seen))) return NULL;
        switch (key) {
        case FUNCTION:
            if (!(p = after(s, p, '{'))) return NULL;
            p = function(s, p, s->at.calls);
            break;
        case CALL_ID: p = text_or_null(s, p, &id); break;
        default: p = passed_text(s, p, &length);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    set_text(&out->call_ids, s->at.calls++, id);
    return seen & FUNCTION ? p : NULL;
}

static place calls(scanner *s, place p)
{
    if (IS(s, p, "null")) return p + 4;
    if (!(p = after(s, p, '['))) return NULL;
    if (p < s->stop && *p == ']') return p + 1;
    for (int more = 1; more;) {
        if (!(p = after(s, p, '{')) || !(p = call(s, p)) || !(p = separator(s, p, ']', &more))) return NULL;
    }
    return p;
}

enum { TEXT_PART = 1, SYSTEM_PART, DEVELOPER_PART };
enum { PART_TYPE = 1, PART_TEXT = 2 };

static inline int part_type(const scanner *s, place p)
{
    if (IS(s, p, "\"text\"") || IS(s, p, "\"input_text\"") || IS(s, p, "\"output_text\"")) return TEXT_PART;
    if (IS(s, p, "\"system_content\"")) return SYSTEM_PART;
    if (IS(s, p, "\"developer_content\"")) return DEVELOPER_PART;
    return 0;
}

/* A part of a content, its text at the end of the texts; `type` says what it is. A key that stands twice is declined
 * only where it matters: of the others nothing is kept. */
static place part(scanner *s, place p, int *type)
{
    unsigned seen = 0;
    int64_t length;
    *type = TEXT_PART;
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        unsigned key = 0;
        range text = {0, ABSENT};
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("type", PART_TYPE)
        else KEY("text", PART_TEXT)
        if (key) {
            if (!(p = noted(s, p, key, &seen))) return NULL;
        } else {
            const place begin = p;
            if (!(p = string(s, p, &length)) || length != p - 1 - begin || !(p = after(s, p, ':'))) return NULL;
        }
        switch (key) {
        case PART_TYPE:
            if (!(*type = part_type(s, p))) return NULL;
            p = passed_text(s, p, &length);
            break;
        case PART_TEXT: p = text_or_null(s, p, &text); break;
        default: p = passed_value(s, p, 4);
        }
        if (!p || !(p = separator(s, p, '}', &more)) || (key == PART_TEXT && text.length < 0)) return NULL;
    }
    return *type != TEXT_PART || (seen & PART_TEXT) ? p : NULL;
}

/* A content that is a list of parts, whose texts lie one behind the other as they are read. A Harmony content is
 * written anew; `role` is then the one it must stand under. */
static place content_parts(scanner *s, place p, range *text, range *structured, uint8_t *role)
{
    text->start = s->at.text;
    p = space(s, p + 1);
    if (p < s->stop && *p == ']') return text->length = 0, p + 1;
    for (int more = 1, first = 1; more; first = 0) {
        const place begin = p;
        int type;
        if (!(p = part(s, p, &type))) return NULL;
        if (type != TEXT_PART) {
            if (!first) return NULL;
            s->at.text = text->start;
            if (!(p = rewritten(s, begin, structured)) || !(p = separator(s, p, ']', &more)) || more) return NULL;
            *role = type == SYSTEM_PART ? SYSTEM : DEVELOPER;
        } else if (!(p = separator(s, p, ']', &more))) {
            return NULL;
        }
    }
    text->length = s->at.text - text->start;
    return p;
}

/* A weight of a few digits, so that the division gives the nearest number, as Python reads it. */
static place weight_of(const scanner *s, place p, double *value)
{
    static const double POWERS[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    int64_t digits_value = 0;
    int behind = 0, is_behind = 0;
    if (IS(s, p, "null")) return p + 4;
    if (p == s->stop || *p < '0' || *p > '9') return NULL;
    const place end = number(s, p);
    if (!end || end - p > 15) return NULL;
    for (; p < end; p++) {
        if (*p == '.') {
            is_behind = 1;
        } else if (*p >= '0' && *p <= '9') {
            digits_value = 10 * digits_value + (*p - '0');
            behind += is_behind;
        } else {
            return NULL;
        }
    }
    *value = (double)digits_value / POWERS[behind];
    return p;
}

static inline place role(scanner *s, place p, uint8_t *code)
{
    if (p == s->stop || *p != '"') return NULL;
    const name *known = name_at(s, p + 1, &s->names->of_role, &s->last_role);
    return known ? *code = known->meaning, p + 1 + known->length : NULL;
}

/* A text that few messages have. */
static place rare(scanner *s, place p, int64_t message, int64_t field)
{
    columns *out = s->out;
    range text;
    if (!(p = text_or_null(s, p, &text)) || text.length < 0) return p;
    if (s->at.rares >= out->rare_capacity) return NULL;
    out->rare[s->at.rares++] = (rare_text){message, field, text.start, text.length};
    return p;
}

typedef struct {
    range content, reasoning, structured;
    double weight;      /* negative where there is none */
    int train;          /* 1, 0, or -1 where it is not said */
    uint8_t role, must; /* `must` is the role that a Harmony content asks for */
} message_parts;

static inline place message_field(scanner *s, place p, int64_t number, int meaning, message_parts *m)
{
    range text;
    switch (meaning) {
    case ROLE: return role(s, p, &m->role);
    case CONTENT:
        if (p == s->stop || *p != '[') return text_or_null(s, p, &m->content);
        return content_parts(s, p, &m->content, &m->structured, &m->must);
    case REASONING: /* has two names */
        if (!(p = text_or_null(s, p, &text)) || text.length < 0) return p;
        if (m->reasoning.length >= 0) return NULL;
        m->reasoning = text;
        return p;
    case TOOL_CALLS: return calls(s, p);
    case WEIGHT: return weight_of(s, p, &m->weight);
    case TRAIN:
        m->train = IS(s, p, "true") ? 1 : IS(s, p, "false") ? 0 : -1;
        return m->train >= 0 ? p + 5 - m->train : IS(s, p, "null") ? p + 4 : NULL;
    default: return rare(s, p, number, meaning);
    }
}

/* What a message says beside its texts. */
static int message_extras(scanner *s, int64_t number, const message_parts *m)
{
    columns *out = s->out;
    if (m->structured.length >= 0) {
        if (m->must != m->role || s->at.rares >= out->rare_capacity) return 0;
        const range json = m->structured;
        out->rare[s->at.rares++] = (rare_text){number, STRUCTURED, json.start, json.length};
    }
    if (m->weight >= 0 || m->train >= 0) {
        if (s->at.weights >= out->weight_capacity) return 0;
        const double value = m->train == 0 ? 0 : m->weight >= 0 ? m->weight : 1;
        out->weights[s->at.weights++] = (weight){number, value};
    }
    return 1;
}

static place message(scanner *s, place p)
{
    columns *out = s->out;
    if (s->at.messages >= out->message_capacity) return NULL;
    const int64_t number = s->at.messages++, first_call = s->at.calls;
    const range none = {0, ABSENT};
    message_parts m = {none, none, none, -1, -1, 0, 0};
    unsigned seen = 0;
    name *key = &s->names->of_message.start;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        if (!name_at(s, p, &s->names->of_message, &key)) return NULL;
        if (!(p = noted(s, p + key->length, key->bit, &seen))) return NULL;
        if (!(p = message_field(s, p, number, key->meaning, &m)) || !(p = separator(s, p, '}', &more))) return NULL;
    }
    if (!m.role || (m.content.length < 0 && s->at.calls == first_call)) return NULL;
    if (!message_extras(s, number, &m)) return NULL;
    out->roles[number] = m.role;
    set_text(&out->contents, number, m.content);
    set_text(&out->reasoning, number, m.reasoning);
    out->call_offsets[number + 1] = s->at.calls;
    return p;
}

static place messages(scanner *s, place p)
{
    if (!(p = after(s, p, '['))) return NULL;
    for (int more = 1; more;) {
        if (!(p = after(s, p, '{')) || !(p = message(s, p)) || !(p = separator(s, p, ']', &more))) return NULL;
    }
    return p;
}

typedef struct {
    place at;
    int64_t length;
} other_key;

typedef struct {
    range id, source, tools, listed, options;
    range turns[MAX_TURNS];
    int lists; /* of messages */
    unsigned seen;
    other_key others[MAX_OTHER_KEYS];
    int other_count;
} record_parts;

/* A key that means nothing here, from behind its opening quote; one with an escape, or that was there, is declined. */
static place unknown_key(const scanner *s, place p, record_parts *r)
{
    int64_t length;
    const place begin = p;
    if (!(p = string(s, p, &length)) || length != p - 1 - begin || r->other_count == MAX_OTHER_KEYS) return NULL;
    for (int i = 0; i < r->other_count; i++) {
        if (r->others[i].length == length && !memcmp(r->others[i].at, begin, (size_t)length)) return NULL;
    }
    r->others[r->other_count++] = (other_key){begin, length};
    return after(s, p, ':');
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

/* The object with messages that a text holds. Its texts lie behind that text itself. */
static place nested(scanner *s, place p)
{
    const place stop = s->stop;
    range text;
    record_parts inner = {.lists = 0};
    if (!(p = text_or_null(s, p, &text)) || text.length < 0) return NULL;
    s->stop = s->out->text + s->at.text;
    place q = after(s, s->out->text + text.start, '{');
    for (int more = 1; q && more;) {
        if (q == s->stop || *q++ != '"') {
            q = NULL;
        } else if (IS(s, q, "messages\"")) {
            q = inner.lists++ ? NULL : after(s, q + sizeof("messages"), ':');
            if (q) q = messages(s, q);
        } else {
            q = unknown_key(s, q, &inner);
            if (q) q = passed_value(s, q, 2);
        }
        if (q) q = separator(s, q, '}', &more);
    }
    const int is_all = q && inner.lists && space(s, q) == s->stop;
    s->stop = stop;
    return is_all ? p : NULL;
}

/* A turn that is a field of the record: a text, or for some shapes a list of messages; either all of them or none. */
static place turn(scanner *s, place p, const name *key, record_parts *r)
{
    range *text = &r->turns[key->turn];
    if (key->meaning == TURN_OR_LIST && p < s->stop && *p == '[') {
        return r->lists++ == key->turn ? messages(s, p) : NULL;
    }
    if (!(p = text_or_null(s, p, text))) return NULL;
    const int is_needed = key->meaning == TURN || key->meaning == TURN_OR_LIST;
    if (is_needed && text->length < 0) return NULL;
    return p;
}

static place record_field(scanner *s, place p, const name *key, record_parts *r)
{
    switch (key->meaning) {
    case LIST: return r->lists++ ? NULL : messages(s, p);
    case NESTED: return r->lists++ ? NULL : nested(s, p);
    case ID: return record_id(s, p, &r->id);
    case SOURCE: return source(s, p, &r->source);
    case TOOLS: return tools(s, p, &r->tools, &r->listed);
    case OPTIONS:
        if (IS(s, p, "null")) return p + 4;
        if (p == s->stop || *p != '{' || !(p = rewritten(s, p, &r->options))) return NULL;
        if (r->options.length == 2) r->options.length = ABSENT; /* no options are none */
        return p;
    case EMPTY_LIST:
        if (IS(s, p, "null")) return p + 4;
        p = after(s, p, '[');
        return p && p < s->stop && *p == ']' ? p + 1 : NULL;
    default: return turn(s, p, key, r);
    }
}

/* Adds a text to the turn before it, with a line feed between. */
static int joined(scanner *s, range *to, range more)
{
    const uint8_t *text = s->out->text, feed = '\n';
    const range first = *to;
    to->start = s->at.text;
    to->length = first.length + 1 + more.length;
    return keep(s, text + first.start, first.length) && keep(s, &feed, 1) && keep(s, text + more.start, more.length);
}

/* Makes room for so many messages before those of the record, which begin at `first`. */
static int shift_messages(scanner *s, int64_t first, int64_t by)
{
    columns *out = s->out;
    const int64_t count = s->at.messages - first;
    if (s->at.messages + by > out->message_capacity) return 0;
    memmove(out->roles + first + by, out->roles + first, (size_t)count);
    int64_t *const columns_of[] = {out->contents.starts, out->contents.lengths, out->reasoning.starts,
                                   out->reasoning.lengths};
    for (int i = 0; i < 4; i++) {
        memmove(columns_of[i] + first + by, columns_of[i] + first, (size_t)count * sizeof(int64_t));
    }
    memmove(out->call_offsets + first + by, out->call_offsets + first, (size_t)(count + 1) * sizeof(int64_t));
    for (int64_t i = out->rares; i < s->at.rares; i++) out->rare[i].message += by;
    for (int64_t i = out->weight_count; i < s->at.weights; i++) out->weights[i].message += by;
    s->at.messages += by;
    return 1;
}

/* The turns of a record as messages, before those that are in its list; 0 where one is missing. */
static int place_turns(scanner *s, record_parts *r, int64_t first)
{
    columns *out = s->out;
    const name_table *table = &s->names->of_record;
    const name *spoken[MAX_TURNS];
    int64_t count = 0;
    for (const name *key = table->names, *end = key + table->count; key < end; key++) {
        if (key->meaning < TURN) continue;
        const range text = r->turns[key->turn];
        if (key->meaning == TURN_OR_LIST && r->lists) {
            if (r->lists != table->turns || text.length >= 0) return 0;
        } else if (key->meaning == OPTIONAL_TURN || key->meaning == JOINED_TURN) {
            if (text.length <= 0) continue;
            if (key->meaning == OPTIONAL_TURN) {
                spoken[count++] = key;
            } else if (!count || !joined(s, &r->turns[spoken[count - 1]->turn], text)) {
                return 0;
            }
        } else {
            if (text.length < 0) return 0;
            spoken[count++] = key;
        }
    }
    if (table->has_list && !r->lists) return 0;
    if (!count) return r->lists > 0;
    if (!shift_messages(s, first, count)) return 0;
    for (int64_t i = 0; i < count; i++) {
        out->roles[first + i] = spoken[i]->role;
        set_text(&out->contents, first + i, r->turns[spoken[i]->turn]);
        set_text(&out->reasoning, first + i, (range){0, ABSENT});
        out->call_offsets[first + i + 1] = out->call_offsets[first];
    }
    return 1;
}

/* One record, up to a line feed or the end; what it adds counts only after `commit`. */
static place record(scanner *s, place p, int64_t line)
{
    columns *out = s->out;
    name_table *table = &s->names->of_record;
    const range none = {0, ABSENT};
    name *last = &table->start;
    record_parts r;
    r.id = r.source = r.tools = r.listed = r.options = none;
    for (int i = 0; i < table->turns; i++) r.turns[i] = none;
    r.lists = r.other_count = 0;
    r.seen = 0;
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        const name *key = name_at(s, p, table, &last);
        if (key) {
            if (!(p = noted(s, p + key->length, key->bit, &r.seen))) return NULL;
            p = record_field(s, p, key, &r);
        } else if ((p = unknown_key(s, p, &r))) {
            p = passed_value(s, p, 2);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    p = space(s, p);
    if (p < s->stop && *p != '\n') return NULL;
    if (!place_turns(s, &r, out->messages)) return NULL;
    set_text(&out->ids, line, r.id);
    set_text(&out->sources, line, r.source);
    set_text(&out->tools, line, r.tools);
    set_text(&out->listed, line, r.listed);
    set_text(&out->options, line, r.options);
    return p;
}
