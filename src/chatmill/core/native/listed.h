/* JSON written anew: tool definitions (the form of core/tools.py), template options, arguments, Harmony contents.
 *
 * All of it as Python's json.dumps(..., ensure_ascii=False) writes what it decodes to; a list of tool definitions as
 * lines, before each a line feed. What that may write in another way (a float, a key that stands twice) ends the attempt,
 * and Python decodes the raw list.
 */

typedef struct {
    uint8_t *at, *end;
} writer;

static inline int put(writer *w, const void *bytes, int64_t count)
{
    if (w->end - w->at < count) return 0;
    memcpy(w->at, bytes, (size_t)count);
    w->at += count;
    return 1;
}

#define PUT(w, literal) put((w), (literal), (int64_t)(sizeof(literal) - 1))

/* A text as JSON, with its quotes. */
static int put_string(writer *w, place text, int64_t length)
{
    static const uint8_t SHORT[32] = {['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'};
    static const char HEX[] = "0123456789abcdef";
    const place stop = text + length;
    if (!PUT(w, "\"")) return 0;
    for (place p = text; p < stop;) {
        const place begin = p;
        while (p < stop && *p >= 0x20 && *p != '"' && *p != '\\') p++;
        if (!put(w, begin, p - begin)) return 0;
        if (p == stop) break;
        const uint8_t c = *p++;
        uint8_t escape[6] = {'\\', c, '0', '0', '0', '0'};
        int64_t count = 2;
        if (c < 0x20 && SHORT[c]) {
            escape[1] = SHORT[c];
        } else if (c < 0x20) {
            escape[1] = 'u';
            escape[4] = (uint8_t)HEX[c >> 4];
            escape[5] = (uint8_t)HEX[c & 15];
            count = 6;
        }
        if (!put(w, escape, count)) return 0;
    }
    return PUT(w, "\"");
}

static place dumped_string(const scanner *s, place p, writer *w)
{
    int64_t length;
    const place begin = p - 1; /* the quote */
    if (!(p = string(s, p, &length))) return NULL;
    if (length == p - begin - 2) return put(w, begin, p - begin) ? p : NULL; /* no escape: it is written already */
    return put_string(w, s->out->text + s->at.text, length) ? p : NULL;
}

/* A whole number; what begins with a minus and a zero, or is no whole number, may be written in another way. */
static place dumped_number(const scanner *s, place p, writer *w)
{
    const place begin = p;
    if (!(p = number(s, p)) || IS(s, begin, "-0")) return NULL;
    for (place c = begin; c < p; c++) {
        if (*c != '-' && (*c < '0' || *c > '9')) return NULL;
    }
    return put(w, begin, p - begin) ? p : NULL;
}

static place dumped(const scanner *s, place p, int depth, writer *w);

static place dumped_members(const scanner *s, place p, int depth, writer *w)
{
    struct {
        const uint8_t *at;
        int64_t length;
    } keys[MAX_OTHER_KEYS];
    int count = 0;
    for (int more = 1; more;) {
        if (p == s->stop || *p != '"' || count == MAX_OTHER_KEYS || (count && !PUT(w, ", "))) return NULL;
        keys[count].at = w->at;
        if (!(p = dumped_string(s, p + 1, w)) || !(p = after(s, p, ':'))) return NULL;
        keys[count].length = w->at - keys[count].at;
        for (int i = 0; i < count; i++) {
            if (keys[i].length == keys[count].length && !memcmp(keys[i].at, keys[count].at, (size_t)keys[i].length))
                return NULL;
        }
        count++;
        if (!PUT(w, ": ") || !(p = dumped(s, p, depth + 1, w)) || !(p = separator(s, p, '}', &more))) return NULL;
    }
    return PUT(w, "}") ? p : NULL;
}

static place dumped(const scanner *s, place p, int depth, writer *w)
{
    if (p == s->stop || depth > MAX_DEPTH) return NULL;
    switch (*p) {
    case '"': return dumped_string(s, p + 1, w);
    case 'n': return IS(s, p, "null") && PUT(w, "null") ? p + 4 : NULL;
    case 't': return IS(s, p, "true") && PUT(w, "true") ? p + 4 : NULL;
    case 'f': return IS(s, p, "false") && PUT(w, "false") ? p + 5 : NULL;
    case '{':
        if (!PUT(w, "{")) return NULL;
        p = space(s, p + 1);
        if (p < s->stop && *p == '}') return PUT(w, "}") ? p + 1 : NULL;
        return dumped_members(s, p, depth, w);
    case '[':
        if (!PUT(w, "[")) return NULL;
        p = space(s, p + 1);
        if (p < s->stop && *p == ']') return PUT(w, "]") ? p + 1 : NULL;
        for (int more = 1, first = 1; more; first = 0) {
            if ((!first && !PUT(w, ", ")) || !(p = dumped(s, p, depth + 1, w)) || !(p = separator(s, p, ']', &more)))
                return NULL;
        }
        return PUT(w, "]") ? p : NULL;
    default: return dumped_number(s, p, w);
    }
}

/* A list of objects (after its opening bracket) as lines. */
static place listed(const scanner *s, place p, writer *w)
{
    p = space(s, p);
    if (p < s->stop && *p == ']') return p + 1;
    for (int more = 1; more;) {
        if (p == s->stop || *p != '{' || !PUT(w, "\n") || !(p = dumped(s, p, 3, w))) return NULL;
        if (!(p = separator(s, p, ']', &more))) return NULL;
    }
    return p;
}
