/* JSON, piece by piece: strings without their escapes, and values that are checked and passed over.
 *
 * The scanner reads a line only where it is sure what it says. A parser below gives the place after what it has read,
 * or NULL: then the whole line is declined, and the checks of the slow way say what is wrong with it, if anything.
 * A line feed is neither white space nor allowed in a string here, so no parser ever leaves its line.
 */

#define ABSENT (-1)
#define MAX_DEPTH 100
#define MAX_OTHER_KEYS 64
#define MAX_NUMBER 64
#define KNOWN_SOURCES 16
#define MAX_PASSED_KEYS 1024
#define MAX_EXPONENT 2 /* digits: with MAX_NUMBER in all, float64 holds every such number */

typedef const uint8_t *place;

typedef struct {
    int64_t start;
    int64_t length; /* in bytes; ABSENT if there is no such text */
} range;

/* A text that few messages have: which field of which message it is. */
typedef struct {
    int64_t message, field, start, length;
} rare_text;

typedef struct {
    int64_t message;
    double value;
} weight;

/* A field of a record that means nothing here and holds something: where its name is in the data. */
typedef struct {
    int64_t line, start, length;
} unused_field;

/* A field of a message that means nothing here: where its name and its value are in the data. */
typedef struct {
    int64_t message, start, length, value, value_length;
    int64_t holds;   /* whether there is something in it */
    int64_t in_part; /* whether it is one of a part of the content */
} extra_field;

/* A number that a record says about its answers, and which one it is. */
typedef struct {
    int64_t line, which;
    double value;
} score;

/* A column of texts. */
typedef struct {
    int64_t *starts, *lengths;
} texts;

static inline void set_text(texts *column, int64_t at, range text)
{
    column->starts[at] = text.start;
    column->lengths[at] = text.length;
}

/* What `scan.py` hands over; the pointers are arrays with room for the capacities below. */
typedef struct {
    int64_t line_capacity, message_capacity, call_capacity, rare_capacity, weight_capacity, text_capacity, json_capacity;
    int64_t unused_capacity, extra_capacity, score_capacity;
    int64_t *line_starts, *line_stops;
    uint8_t *read;
    int64_t *message_offsets; /* one more than lines */
    texts ids, sources;
    texts tools;           /* in the data, not in the text */
    texts listed, options; /* in the JSON that is written anew */
    uint8_t *roles;
    texts contents, reasoning;
    int64_t *call_offsets; /* one more than messages */
    texts call_names, call_arguments, call_ids;
    uint8_t *call_orders;
    rare_text *rare;
    weight *weights;
    uint8_t *text; /* texts without their escapes */
    uint8_t *json; /* JSON that is written anew */
    unused_field *unused;
    extra_field *extras;
    score *scores;
    int64_t lines, messages, calls, rares, weight_count, text_bytes, json_bytes; /* how many there are in the end */
    int64_t unused_count, extra_count, score_count;
} columns;

typedef struct {
    int64_t messages, calls, rares, weights, text, json, unused, extras, scores;
} counts;

/* Hashes of the keys of objects that are passed over: those of an object follow those of the one it is in. */
typedef struct {
    int64_t count;
    uint64_t hashes[MAX_PASSED_KEYS];
} passed_keys;

typedef struct shape shape;
typedef struct name name;

typedef struct {
    columns *out;
    shape *names;
    place data; /* places in `tools` count from here */
    place stop; /* no byte from here on is ever read */
    counts at;  /* with those of the line that is being read */
    passed_keys *keys;
    range known_sources[KNOWN_SOURCES]; /* the last ones, which are most likely to be met again */
    int64_t source_count;
    name *last_role;
    int is_call;     /* whether messages are calls: answers that are nothing but tokens */
    int is_optional; /* whether a record may have no list of messages */
    int turns;       /* how many messages are fields of a record */
} scanner;

enum { SYSTEM = 1, DEVELOPER, USER, ASSISTANT, TOOL }; /* RoleCode in kinds.py */

static inline uint64_t word_at(place p)
{
    uint64_t word;
    memcpy(&word, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* The high bit of every byte that cannot be copied as it is: a quote, a backslash, a control character, or not ASCII.
 * Bytes above the first such one may be marked wrongly (a borrow), so only the first counts. */
static inline uint64_t special_bytes(uint64_t word)
{
    const uint64_t quotes = (word ^ (ONES * '"')) - ONES;
    const uint64_t backslashes = (word ^ (ONES * '\\')) - ONES;
    const uint64_t controls = word - ONES * 0x20;
    return (quotes | backslashes | controls | word) & HIGHS;
}

/* Bytes of the character that begins at `p`, which is not ASCII; 0 where that is not UTF-8. Four bytes must be there,
 * and they are in every valid line: the shortest character, a quote and a bracket. */
static inline int character_bytes(place p)
{
    const uint8_t a = p[0], b = p[1];
    if (a < 0xC2 || (b & 0xC0) != 0x80) return 0;
    if (a < 0xE0) return 2;
    if ((p[2] & 0xC0) != 0x80) return 0;
    if (a < 0xF0) {
        if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b >= 0xA0)) return 0;
        return 3;
    }
    if ((p[3] & 0xC0) != 0x80 || a > 0xF4 || (a == 0xF0 && b < 0x90) || (a == 0xF4 && b >= 0x90)) return 0;
    return 4;
}

static inline int is_plain(uint8_t c) { return c >= 0x20 && c < 0x80 && c != '"' && c != '\\'; }

/* Four hexadecimal digits as a number, or -1. */
static inline int32_t hex4(place p)
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t c = p[i];
        int32_t digit;
        if (c >= '0' && c <= '9') {
            digit = c - '0';
        } else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') {
            digit = (c | 0x20) - 'a' + 10;
        } else {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

static const uint8_t ESCAPED[256] = {['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
                                     ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t'};

/* A \u escape at `p`, with its second half where it has one, as UTF-8. NUL and lone surrogates are declined. */
static place unicode_escape(place p, place stop, uint8_t **to)
{
    if (stop - p < 6) return NULL;
    int32_t code = hex4(p + 2);
    p += 6;
    if (code <= 0 || (code >= 0xDC00 && code < 0xE000)) return NULL;
    if (code >= 0xD800 && code < 0xDC00) {
        if (stop - p < 6 || p[0] != '\\' || p[1] != 'u') return NULL;
        const int32_t low = hex4(p + 2);
        if (low < 0xDC00 || low >= 0xE000) return NULL;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        p += 6;
    }
    uint8_t *out = *to;
    if (code < 0x80) {
        *out++ = (uint8_t)code;
    } else if (code < 0x800) {
        *out++ = (uint8_t)(0xC0 | (code >> 6));
        *out++ = (uint8_t)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *out++ = (uint8_t)(0xE0 | (code >> 12));
        *out++ = (uint8_t)(0x80 | ((code >> 6) & 0x3F));
        *out++ = (uint8_t)(0x80 | (code & 0x3F));
    } else {
        *out++ = (uint8_t)(0xF0 | (code >> 18));
        *out++ = (uint8_t)(0x80 | ((code >> 12) & 0x3F));
        *out++ = (uint8_t)(0x80 | ((code >> 6) & 0x3F));
        *out++ = (uint8_t)(0x80 | (code & 0x3F));
    }
    *to = out;
    return p;
}

/* The text of a string, from after its opening quote, written at the end of the text so far, where it stays only if
 * the caller moves that end. No text is longer than its escaped form, so it is enough to look at the room once. */
static place string(const scanner *s, place p, int64_t *length)
{
    const place stop = s->stop;
    uint8_t *const begin = s->out->text + s->at.text;
    uint8_t *to = begin;
    if (s->out->text_capacity - s->at.text < stop - p) return NULL;
    for (;;) {
        while (stop - p >= 16) {
            const uint64_t first = special_bytes(word_at(p)), second = special_bytes(word_at(p + 8));
            memcpy(to, p, 16);
            if (first) {
                const int plain = __builtin_ctzll(first) >> 3;
                p += plain;
                to += plain;
                break;
            }
            if (second) {
                const int plain = 8 + (__builtin_ctzll(second) >> 3);
                p += plain;
                to += plain;
                break;
            }
            p += 16;
            to += 16;
        }
        if (p == stop) return NULL;
        if (*p == '\\') {
            if (stop - p < 2) return NULL;
            const uint8_t c = ESCAPED[p[1]];
            if (c) {
                *to++ = c;
                p += 2;
            } else if (p[1] == 'u') {
                p = unicode_escape(p, stop, &to);
                if (!p) return NULL;
            } else {
                return NULL;
            }
        } else if (*p == '"') {
            *length = to - begin;
            return p + 1;
        } else if (*p >= 0x80) {
            for (;;) {
                if (stop - p < 4) return NULL;
                const int bytes = character_bytes(p);
                if (!bytes) return NULL;
                memcpy(to, p, 4);
                p += bytes;
                to += bytes;
                if (stop - p < 2) return NULL;
                if (is_plain(p[0]) && p[1] >= 0x80) *to++ = *p++; /* a space between two words */
                if (*p < 0x80) break;
            }
        } else if (*p < 0x20) {
            return NULL;
        } else {
            *to++ = *p++;
        }
    }
}

static inline place space(const scanner *s, place p)
{
    while (p < s->stop && (*p == ' ' || *p == '\t' || *p == '\r')) p++;
    return p;
}

/* Whether these bytes (a literal) stand at `p`. */
#define IS(s, p, literal)                                                                                              \
    ((s)->stop - (p) >= (ptrdiff_t)(sizeof(literal) - 1) && memcmp((p), (literal), sizeof(literal) - 1) == 0)

/* After one byte that must come next, white space before and after it passed over. */
static inline place after(const scanner *s, place p, uint8_t byte)
{
    p = space(s, p);
    if (p == s->stop || *p != byte) return NULL;
    return space(s, p + 1);
}

/* After the comma or the closing bracket that must follow a value; `more` says which it was. */
static inline place separator(const scanner *s, place p, uint8_t closing, int *more)
{
    p = space(s, p);
    if (p == s->stop || (*p != ',' && *p != closing)) return NULL;
    *more = *p == ',';
    p++;
    return *more ? space(s, p) : p;
}

/* A string or null; the text is kept. */
static inline place text_or_null(scanner *s, place p, range *found)
{
    if (p == s->stop) return NULL;
    if (*p == '"') {
        found->start = s->at.text;
        p = string(s, p + 1, &found->length);
        if (p) s->at.text += found->length;
        return p;
    }
    found->start = 0;
    found->length = ABSENT;
    return IS(s, p, "null") ? p + 4 : NULL;
}

/* A string or null of which only the length is wanted. */
static inline place passed_text(const scanner *s, place p, int64_t *length)
{
    if (p == s->stop) return NULL;
    if (*p == '"') return string(s, p + 1, length);
    *length = ABSENT;
    return IS(s, p, "null") ? p + 4 : NULL;
}

static inline place digits(const scanner *s, place p)
{
    const place first = p;
    while (p < s->stop && *p >= '0' && *p <= '9') p++;
    return p > first ? p : NULL;
}

static place number(const scanner *s, place p)
{
    const place first = p;
    if (*p == '-') p++;
    if (p < s->stop && *p == '0') {
        p++;
    } else if (!(p = digits(s, p))) {
        return NULL;
    }
    if (p < s->stop && *p == '.' && !(p = digits(s, p + 1))) return NULL;
    if (p < s->stop && (*p | 0x20) == 'e') {
        p++;
        if (p < s->stop && (*p == '+' || *p == '-')) p++;
        const place exponent = p;
        if (!(p = digits(s, p)) || p - exponent > MAX_EXPONENT) return NULL;
    }
    return p - first <= MAX_NUMBER ? p : NULL;
}

/* Notes a key that ends the texts; 0 where the object, whose first key is number `first`, may have it already. Only
 * hashes are compared: where two are equal, or there is no room, the line is declined. */
static int is_new_key(const scanner *s, int64_t first, int64_t length)
{
    passed_keys *keys = s->keys;
    uint8_t high;
    const uint64_t hash = hash_of(s->out->text + s->at.text, length, &high);
    if (keys->count == MAX_PASSED_KEYS) return 0;
    for (int64_t i = first; i < keys->count; i++) {
        if (keys->hashes[i] == hash) return 0;
    }
    keys->hashes[keys->count++] = hash;
    return 1;
}

/* Any JSON value, checked and passed over. One with a key that stands twice in an object is declined. */
static place passed_value(const scanner *s, place p, int depth)
{
    int64_t length;
    if (p == s->stop || depth > MAX_DEPTH) return NULL;
    switch (*p) {
    case '"': return string(s, p + 1, &length);
    case 'n': return IS(s, p, "null") ? p + 4 : NULL;
    case 't': return IS(s, p, "true") ? p + 4 : NULL;
    case 'f': return IS(s, p, "false") ? p + 5 : NULL;
    case '[':
    case '{': break;
    default: return number(s, p);
    }
    const int is_object = *p == '{';
    const int64_t first_key = s->keys->count;
    const uint8_t closing = is_object ? '}' : ']';
    p = space(s, p + 1);
    if (p < s->stop && *p == closing) return p + 1;
    for (int more = 1; more;) {
        if (is_object) {
            if (p == s->stop || *p != '"') return NULL;
            if (!(p = string(s, p + 1, &length)) || !is_new_key(s, first_key, length)) return NULL;
            if (!(p = after(s, p, ':'))) return NULL;
        }
        if (!(p = passed_value(s, p, depth + 1)) || !(p = separator(s, p, closing, &more))) return NULL;
    }
    s->keys->count = first_key;
    return p;
}
