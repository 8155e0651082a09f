/* Messages with all their fields, under the names of a shape. */

/* After a key at `p` (after its opening quote) of a level whose names never change; 0 where it is none of them. */
#define KEY(literal, bit)                                                                                              \
    if (IS(s, p, literal "\"")) {                                                                                      \
        p += sizeof(literal);                                                                                          \
        key = (bit);                                                                                                   \
    }

/* After the colon, with the key noted in `seen`; a second one is declined. */
static inline place noted(const scanner *s, place p, unsigned key, unsigned *seen)
{
    if (*seen & key) return NULL;
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

/* Whether a value is null, or an empty text, list or object. */
static int is_nothing(const scanner *s, place p)
{
    if (IS(s, p, "null") || IS(s, p, "\"\"")) return 1;
    if (p == s->stop || (*p != '[' && *p != '{')) return 0;
    const uint8_t end = *p == '[' ? ']' : '}';
    p = space(s, p + 1);
    return p < s->stop && *p == end;
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

/* Whether a key begins as those do by which people say how something is trained (core/part_training.py). */
static int speaks_of_training(const scanner *s, place p)
{
    static const char *const BEGINNINGS[] = {"train", "weight", "mask", "loss"};
    for (int i = 0; i < 4; i++) {
        const char *wanted = BEGINNINGS[i];
        place at = p;
        while (*wanted && at < s->stop && (*at | 0x20) == *wanted) at++, wanted++;
        if (!*wanted) return 1;
    }
    return 0;
}

/* A key of which nothing is kept, from after its opening quote up to after its colon. One with an escape, which may be
 * another, is declined, and so is one that is among the passed keys of its object, from number `first` on. */
static place passed_key(const scanner *s, place p, int64_t first)
{
    int64_t length;
    const place begin = p;
    if (!(p = string(s, p, &length)) || length != p - 1 - begin || !is_new_key(s, first, length)) return NULL;
    return after(s, p, ':');
}

/* The same and its value. */
static place passed_member(const scanner *s, place p, int64_t first)
{
    return (p = passed_key(s, p, first)) ? passed_value(s, p, 4) : NULL;
}

/* The same of a part of a message: a key that speaks of training is declined. */
static place passed_of_message(const scanner *s, place p, int64_t first)
{
    return speaks_of_training(s, p) ? NULL : passed_member(s, p, first);
}

enum { FUNCTION_NAME = 1, ARGUMENTS = 2, ARGUMENTS_FIRST = 64 };

static place function(scanner *s, place p, int64_t call)
{
    columns *out = s->out;
    const int64_t first_key = s->keys->count;
    unsigned seen = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        range text;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("name", FUNCTION_NAME)
        else KEY("arguments", ARGUMENTS)
        if (key && !(p = noted(s, p, key, &seen))) return NULL;
        if (seen == ARGUMENTS) out->call_orders[call] = ARGUMENTS_FIRST;
        if (key == FUNCTION_NAME) {
            if (!(p = text_or_null(s, p, &text)) || text.length < 0) return NULL;
            set_text(&out->call_names, call, text);
        } else if (key) {
            if (!(p = arguments(s, p, &text))) return NULL;
            set_text(&out->call_arguments, call, text);
        } else if (!(p = passed_of_message(s, p, first_key))) {
            return NULL;
        }
        if (!(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    return seen == (FUNCTION_NAME | ARGUMENTS) ? p : NULL;
}

enum { FUNCTION = 1, CALL_ID = 2, CALL_TYPE = 4 };

static place call(scanner *s, place p)
{
    columns *out = s->out;
    if (s->at.calls >= out->call_capacity) return NULL;
    const int64_t first_key = s->keys->count;
    unsigned seen = 0, order = 0, last = 0; /* the keys in base 4, as in core.conversation */
    int unusual = 0;
    range id = {0, ABSENT};
    out->call_orders[s->at.calls] = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        int64_t length;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("function", FUNCTION)
        else KEY("id", CALL_ID)
        else KEY("type", CALL_TYPE)
        if (key) {
            if (!(p = noted(s, p, key, &seen))) return NULL;
            const unsigned digit = key == CALL_ID ? 1 : key == CALL_TYPE ? 2 : 3;
            unusual |= digit < last;
            order = 4 * order + (last = digit);
        }
        switch (key) {
        case FUNCTION:
            if (!(p = after(s, p, '{'))) return NULL;
            p = function(s, p, s->at.calls);
            break;
        case CALL_ID: p = text_or_null(s, p, &id); break;
        case CALL_TYPE: p = passed_text(s, p, &length); break;
        default: p = passed_of_message(s, p, first_key);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    if (unusual) out->call_orders[s->at.calls] |= (uint8_t)order;
    set_text(&out->call_ids, s->at.calls++, id);
    return seen & FUNCTION ? p : NULL;
}

/* The objects of a list, each read by `one`. */
static place objects(scanner *s, place p, place (*one)(scanner *, place))
{
    if (!(p = after(s, p, '['))) return NULL;
    for (int more = 1; more;) {
        if (!(p = after(s, p, '{')) || !(p = one(s, p)) || !(p = separator(s, p, ']', &more))) return NULL;
    }
    return p;
}

/* The same where there may be none. */
static place objects_or_none(scanner *s, place p, place (*one)(scanner *, place))
{
    if (IS(s, p, "null")) return p + 4;
    const place first = after(s, p, '[');
    return first && first < s->stop && *first == ']' ? first + 1 : objects(s, p, one);
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

/* Notes a field of a message, or of a part of its content, that means nothing here: where its name of so many bytes and
 * its value are, which ends at `end`. */
static int add_extra(scanner *s, int64_t message, place name, int64_t length, place value, place end, int in_part)
{
    columns *out = s->out;
    if (s->at.extras >= out->extra_capacity) return 0;
    const place data = s->data;
    out->extras[s->at.extras++] =
        (extra_field){message, name - data, length, value - data, end - value, !is_nothing(s, value), in_part};
    return 1;
}

/* A part of a content, its text at the end of the texts; `type` says what it is. `strict`: a text has the type `text`
 * and no other key. */
static place part(scanner *s, place p, int *type, int strict)
{
    const int64_t first_key = s->keys->count, first_extra = s->at.extras;
    unsigned seen = 0;
    int others = 0;
    int64_t length;
    *type = TEXT_PART;
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        unsigned key = 0;
        range text = {0, ABSENT};
        if (p == s->stop || *p++ != '"') return NULL;
        const place name = p;
        KEY("type", PART_TYPE)
        else KEY("text", PART_TEXT)
        if (key) {
            if (!(p = noted(s, p, key, &seen))) return NULL;
        } else {
            others++;
            if (speaks_of_training(s, p) || !(p = passed_key(s, p, first_key))) return NULL;
            length = (place)memchr(name, '"', (size_t)(p - name)) - name; /* without escapes, as a passed key is */
        }
        switch (key) {
        case PART_TYPE:
            if (!(*type = part_type(s, p))) return NULL;
            if (strict && *type == TEXT_PART && !IS(s, p, "\"text\"")) return NULL;
            p = passed_text(s, p, &length);
            break;
        case PART_TEXT: p = text_or_null(s, p, &text); break;
        default: {
            const place value = p; /* null is none */
            if (!(p = passed_value(s, p, 4))) return NULL;
            if (!IS(s, value, "null") && !add_extra(s, s->at.messages - 1, name, length, value, p, 1)) return NULL;
        }
        }
        if (!p || !(p = separator(s, p, '}', &more)) || (key == PART_TEXT && text.length < 0)) return NULL;
    }
    s->keys->count = first_key;
    if (*type != TEXT_PART) return s->at.extras = first_extra, p; /* all of it is kept */
    if (strict && (others || !(seen & PART_TYPE))) return NULL;
    return seen & PART_TEXT ? p : NULL;
}

/* A content that is a list of parts, whose texts lie one after another as they are read. A Harmony content is
 * written anew; `role` is then the one it must stand under. `strict`: one part, not none and not several. */
static place content_parts(scanner *s, place p, range *text, range *structured, uint8_t *role, int strict)
{
    text->start = s->at.text;
    p = space(s, p + 1);
    if (p < s->stop && *p == ']') return text->length = 0, strict ? NULL : p + 1;
    for (int more = 1, first = 1; more; first = 0) {
        const place begin = p;
        int type;
        if (!(p = part(s, p, &type, strict))) return NULL;
        if (type != TEXT_PART) {
            if (!first) return NULL;
            s->at.text = text->start;
            if (!(p = rewritten(s, begin, structured)) || !(p = separator(s, p, ']', &more)) || more) return NULL;
            *role = type == SYSTEM_PART ? SYSTEM : DEVELOPER;
        } else if (!(p = separator(s, p, ']', &more)) || (strict && more)) {
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

/* Keeps a text that few messages have, if there is one; 0 where there is no room. */
static int add_rare(scanner *s, int64_t message, int64_t field, range text)
{
    columns *out = s->out;
    if (text.length < 0) return 1;
    if (s->at.rares >= out->rare_capacity) return 0;
    out->rare[s->at.rares++] = (rare_text){message, field, text.start, text.length};
    return 1;
}

/* A token id: digits alone, as many as int32 holds. */
static inline place token_id(const scanner *s, place p, uint8_t *out)
{
    int64_t value = 0;
    const place begin = p;
    while (p < s->stop && *p >= '0' && *p <= '9' && p - begin < 11) value = 10 * value + (*p++ - '0');
    if (p == begin || value > INT32_MAX || (*begin == '0' && p - begin > 1)) return NULL;
    const int32_t id = (int32_t)value;
    memcpy(out, &id, sizeof id);
    return p;
}

/* A log-probability, rounded twice as Python does it: to a double, and to a float; NaN for null. One above 0 is none. */
static place logprob(const scanner *s, place p, uint8_t *out)
{
    double value = NAN;
    if (IS(s, p, "null")) {
        p += 4;
    } else {
        char text[MAX_NUMBER + 1], *read;
        const place begin = p, digits = p < s->stop && *p == '-' ? p + 1 : p;
        if (digits == s->stop || *digits < '0' || *digits > '9' || !(p = number(s, p))) return NULL;
        if (weight_of(s, digits, &value)) { /* so few digits that it is exact */
            value = digits > begin ? -value : value;
        } else {
            memcpy(text, begin, (size_t)(p - begin));
            text[p - begin] = 0;
            value = strtod(text, &read);
            if (*read) return NULL; /* another decimal point in this locale */
        }
        if (!(value >= -1e30 && value <= 0)) return NULL;
    }
    const float rounded = (float)value;
    memcpy(out, &rounded, sizeof rounded);
    return p;
}

/* After an object of which only the value of one key matters, `wanted` with its closing quote; NULL where it is not
 * there once. */
static place only_value(const scanner *s, place p, const char *wanted, place *value)
{
    const size_t size = strlen(wanted);
    const int64_t first = s->keys->count;
    *value = NULL;
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        const int is_wanted = s->stop - p >= (ptrdiff_t)size && !memcmp(p, wanted, size);
        if (!(p = passed_key(s, p, first))) return NULL;
        if (is_wanted) *value = p;
        if (!(p = passed_value(s, p, 4)) || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first;
    return *value ? p : NULL;
}

/* A list of numbers, four bytes each, at the end of the texts; none for null. Log-probabilities may be written as the
 * chat completions API does it: objects in the list `content` of one. */
static place numbers(scanner *s, place p, int64_t field, range *found)
{
    const columns *out = s->out;
    place end = NULL, value;
    *found = (range){s->at.text, ABSENT};
    if (IS(s, p, "null")) return p + 4;
    const int are_objects = field == LOGPROBS && p < s->stop && *p == '{';
    if (are_objects && (!(end = only_value(s, p, "content\"", &value)) || !(p = value))) return NULL;
    if (!(p = after(s, p, '['))) return NULL;
    for (int more = 1; more; s->at.text += 4) {
        uint8_t *const to = out->text + s->at.text;
        if (out->text_capacity - s->at.text < 4) return NULL;
        if (are_objects) {
            if (!(p = only_value(s, p, "logprob\"", &value)) || !logprob(s, value, to)) return NULL;
        } else {
            p = field == LOGPROBS ? logprob(s, p, to) : token_id(s, p, to);
        }
        if (!p || !(p = separator(s, p, ']', &more))) return NULL;
    }
    found->length = s->at.text - found->start;
    return end ? end : p;
}

/* Whether tokens that were sampled, their prompt and their log-probabilities fit together. */
static inline int is_sampled_well(range sampled, range sent, range logprobs)
{
    return sampled.length >= 0 ? logprobs.length < 0 || logprobs.length == sampled.length
                               : sent.length < 0 && logprobs.length < 0;
}

typedef struct {
    range content, reasoning, structured;
    double weight;      /* negative if there is none */
    int train;          /* 1, 0, or -1 where it is not said */
    uint8_t role, must; /* `must` is the role that a Harmony content asks for */
    range sampled, sent, logprobs; /* the tokens that were sampled, and those of their prompt */
} message_parts;

/* A field of a message that nobody has named, from after the opening quote of its name. One by which people say how
 * something is trained is declined. */
static place unnamed_field(scanner *s, place p, int64_t message, int64_t first_key)
{
    int64_t length;
    const place name = p;
    if (speaks_of_training(s, p) || !(p = string(s, p, &length)) || length != p - 1 - name) return NULL;
    if (!is_new_key(s, first_key, length) || !(p = after(s, p, ':'))) return NULL;
    const place value = p;
    return (p = passed_value(s, p, 4)) && add_extra(s, message, name, length, value, p, 0) ? p : NULL;
}

static inline place message_field(scanner *s, place p, int64_t number, int meaning, message_parts *m)
{
    range text;
    switch (meaning) {
    case ROLE: return role(s, p, &m->role);
    case CONTENT:
    case ONE_CONTENT:
        if (p == s->stop || *p != '[') return text_or_null(s, p, &m->content);
        return content_parts(s, p, &m->content, &m->structured, &m->must, meaning == ONE_CONTENT);
    case REASONING: /* has two names */
        if (!(p = text_or_null(s, p, &text)) || text.length < 0) return p;
        if (m->reasoning.length >= 0) return NULL;
        m->reasoning = text;
        return p;
    case TOOL_CALLS: return objects_or_none(s, p, call);
    case WEIGHT: return weight_of(s, p, &m->weight);
    case TRAIN:
        m->train = IS(s, p, "true") ? 1 : IS(s, p, "false") ? 0 : -1;
        return m->train >= 0 ? p + 5 - m->train : IS(s, p, "null") ? p + 4 : NULL;
    case TOKEN_IDS: return numbers(s, p, meaning, &m->sampled);
    case PROMPT_TOKEN_IDS: return numbers(s, p, meaning, &m->sent);
    case LOGPROBS: return numbers(s, p, meaning, &m->logprobs);
    case PASSED_FIELD: return passed_value(s, p, 4);
    case NULL_FIELD: return IS(s, p, "null") ? p + 4 : NULL;
    default: return (p = text_or_null(s, p, &text)) && add_rare(s, number, meaning, text) ? p : NULL;
    }
}

/* What a message says besides its texts. */
static int message_extras(scanner *s, int64_t number, const message_parts *m)
{
    columns *out = s->out;
    if (m->structured.length >= 0 && m->must != m->role) return 0;
    const int is_sampled = m->sampled.length >= 0 || m->sent.length >= 0 || m->logprobs.length >= 0;
    if (is_sampled && (m->role != ASSISTANT || !is_sampled_well(m->sampled, m->sent, m->logprobs))) return 0;
    if (!add_rare(s, number, STRUCTURED, m->structured) || !add_rare(s, number, TOKEN_IDS, m->sampled)
        || !add_rare(s, number, PROMPT_TOKEN_IDS, m->sent) || !add_rare(s, number, LOGPROBS, m->logprobs)) {
        return 0;
    }
    if (m->weight >= 0 || m->train >= 0) {
        if (s->at.weights >= out->weight_capacity) return 0;
        const double value = m->train == 0 ? 0 : m->weight >= 0 ? m->weight : 1;
        out->weights[s->at.weights++] = (weight){number, value};
    }
    return 1;
}

/* Ends a message; 0 where it is declined. */
static int ended(scanner *s, int64_t number, int is_said, const message_parts *m)
{
    columns *out = s->out;
    if (!m->role || !is_said || !message_extras(s, number, m)) return 0;
    out->roles[number] = m->role;
    set_text(&out->contents, number, m->content);
    set_text(&out->reasoning, number, m->reasoning);
    out->call_offsets[number + 1] = s->at.calls;
    return 1;
}

static message_parts no_parts(uint8_t role)
{
    const range none = {0, ABSENT};
    return (message_parts){none, none, none, -1, -1, role, 0, none, none, none};
}

static place message(scanner *s, place p)
{
    if (s->at.messages >= s->out->message_capacity) return NULL;
    const int64_t number = s->at.messages++, first_call = s->at.calls;
    const int64_t first_key = s->keys->count;
    message_parts m = no_parts(s->is_call ? ASSISTANT : 0);
    unsigned seen = 0;
    name *key = &s->names->of_message.start;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        const place given = p;
        if (name_at(s, p, &s->names->of_message, &key)) {
            if (!(p = noted(s, p + key->length, key->bit, &seen))) return NULL;
            if (key->meaning != EMPTY_FIELD) {
                p = message_field(s, p, number, key->meaning, &m);
            } else if (is_nothing(s, p)) { /* like one that nobody has named */
                const place value = p;
                if ((p = passed_value(s, p, 4)) && !add_extra(s, number, given, key->length - 1, value, p, 0)) return NULL;
            } else {
                return NULL;
            }
        } else if (s->is_call) { /* of a call nothing else is kept */
            p = passed_of_message(s, p, first_key);
        } else {
            p = unnamed_field(s, p, number, first_key);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    const int is_said = s->is_call ? m.sampled.length >= 0 : m.content.length >= 0 || s->at.calls > first_call;
    return ended(s, number, is_said, &m) ? p : NULL;
}
