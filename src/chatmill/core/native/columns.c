/* Loops over single bytes that NumPy cannot express: copies of many short ranges, and JSONL chats read into columns.
 *
 * Plain C11 without Python's headers; `library.py` loads it, and every function here has a slow twin in Python that
 * tests compare it with. A function that meets what it does not expect says so and leaves the work to that twin.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define ABI_VERSION 3 /* the same number as in library.py: change both whenever a signature or a struct changes */

#ifndef SOURCE_CHECKSUM
#define SOURCE_CHECKSUM 0 /* of these files, given by the build, so that a test can tell a library of an older source */
#endif

#include "copies.h"
#include "json.h"
#include "listed.h"

EXPORT int64_t chatmill_abi_version(void) { return ABI_VERSION; }

EXPORT int64_t chatmill_source_checksum(void) { return SOURCE_CHECKSUM; }

/* The keys of each level; a key with the quote that ends it, so that no longer one is taken for it. */
#define KEY(literal, bit)                                                                                              \
    if (IS(s, p, literal "\"")) {                                                                                      \
        p += sizeof(literal);                                                                                          \
        key = (bit);                                                                                                   \
    }

/* Behind the key at `p` (behind its opening quote) and the colon, with the key noted in `seen`; a second one, like an
 * unknown one (0), is declined. */
static inline place noted(const scanner *s, place p, unsigned key, unsigned *seen)
{
    if (!key || (*seen & key)) return NULL;
    *seen |= key;
    return after(s, p, ':');
}

enum { FUNCTION_NAME = 1, ARGUMENTS = 2 };

static place function(scanner *s, place p, int64_t call)
{
    const columns *out = s->out;
    unsigned seen = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        range text;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("name", FUNCTION_NAME)
        else KEY("arguments", ARGUMENTS)
        if (!(p = noted(s, p, key, &seen)) || !(p = text_or_null(s, p, &text)) || text.length < 0) return NULL;
        if (key == FUNCTION_NAME) {
            out->name_starts[call] = text.start;
            out->name_lengths[call] = text.length;
        } else {
            out->argument_starts[call] = text.start;
            out->argument_lengths[call] = text.length;
        }
        if (!(p = separator(s, p, '}', &more))) return NULL;
    }
    return seen == (FUNCTION_NAME | ARGUMENTS) ? p : NULL;
}

enum { FUNCTION = 1, CALL_ID = 2, CALL_TYPE = 4 };

static place call(scanner *s, place p)
{
    if (s->calls >= s->out->call_capacity) return NULL;
    unsigned seen = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        int64_t length;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("function", FUNCTION)
        else KEY("id", CALL_ID)
        else KEY("type", CALL_TYPE)
        if (!(p = noted(s, p, key, &seen))) return NULL;
        if (key == FUNCTION) {
            if (!(p = after(s, p, '{'))) return NULL;
            p = function(s, p, s->calls);
        } else {
            p = passed_text(s, p, &length);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->calls++;
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

static inline place role(const scanner *s, place p, uint8_t *code)
{
    if (IS(s, p, "\"user\"")) return *code = USER, p + 6;
    if (IS(s, p, "\"assistant\"")) return *code = ASSISTANT, p + 11;
    if (IS(s, p, "\"system\"")) return *code = SYSTEM, p + 8;
    if (IS(s, p, "\"tool\"")) return *code = TOOL, p + 6;
    if (IS(s, p, "\"developer\"")) return *code = DEVELOPER, p + 11;
    return NULL;
}

enum { ROLE = 1, CONTENT = 2, REASONING = 4, TOOL_CALLS = 8, TOOL_CALL_ID = 16, NAME = 32 };

static place message(scanner *s, place p)
{
    const columns *out = s->out;
    if (s->messages >= out->message_capacity) return NULL;
    const int64_t number = s->messages++, first_call = s->calls;
    range content = {0, ABSENT}, reasoning = {0, ABSENT};
    uint8_t code = 0, named = 0;
    unsigned seen = 0;
    for (int more = 1; more;) {
        unsigned key = 0;
        int64_t length;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("role", ROLE)
        else KEY("content", CONTENT)
        else KEY("reasoning_content", REASONING)
        else KEY("tool_calls", TOOL_CALLS)
        else KEY("tool_call_id", TOOL_CALL_ID)
        else KEY("name", NAME)
        if (!(p = noted(s, p, key, &seen))) return NULL;
        switch (key) {
        case ROLE: p = role(s, p, &code); break;
        case CONTENT: p = text_or_null(s, p, &content); break;
        case REASONING: p = text_or_null(s, p, &reasoning); break;
        case TOOL_CALLS: p = calls(s, p); break;
        default:
            p = passed_text(s, p, &length);
            if (p) named |= length > 0;
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    if (!code || (content.length < 0 && s->calls == first_call)) return NULL;
    out->roles[number] = code;
    out->named[number] = named;
    out->content_starts[number] = content.start;
    out->content_lengths[number] = content.length;
    out->reasoning_starts[number] = reasoning.start;
    out->reasoning_lengths[number] = reasoning.length;
    out->call_offsets[number + 1] = s->calls;
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

/* The source of a record; one that was met lately is not kept a second time. */
static place source(scanner *s, place p, range *found)
{
    if (!(p = text_or_null(s, p, found)) || found->length == 0) return NULL;
    for (int64_t i = 0; i < KNOWN_SOURCES && i < s->source_count; i++) {
        const range known = s->sources[i];
        const uint8_t *text = s->out->text;
        if (known.length == found->length && !memcmp(text + known.start, text + found->start, (size_t)known.length)) {
            s->used = found->start;
            *found = known;
            break;
        }
    }
    return p;
}

enum { MESSAGES = 1, ID = 2, SOURCE = 4, TOOLS = 8, RAW_MESSAGES = 16 };

typedef struct {
    place at;
    int64_t length;
} other_key;

/* A key that means nothing here, from behind its opening quote; one with an escape, or that was there, is declined. */
static place unknown_key(const scanner *s, place p, other_key *keys, int *count)
{
    int64_t length;
    const place begin = p;
    if (!(p = string(s, p, &length)) || length != p - 1 - begin || *count == MAX_OTHER_KEYS) return NULL;
    for (int i = 0; i < *count; i++) {
        if (keys[i].length == length && !memcmp(keys[i].at, begin, (size_t)length)) return NULL;
    }
    keys[*count].at = begin;
    keys[*count].length = length;
    ++*count;
    return after(s, p, ':');
}

/* The tools of a record: their range in the data, and where that can be done their lines. */static place tools(scanner *s, place p, range *found, range *lines)
{
    columns *out = s->out;
    const place begin = p;
    if (IS(s, p, "null")) return p + 4;
    if (p == s->stop || *p != '[') return NULL;
    writer w = {out->listed + s->listed, out->listed + out->listed_capacity};
    const place end = listed(s, p + 1, &w);
    if (end) {
        lines->start = s->listed;
        lines->length = w.at - (out->listed + s->listed);
        s->listed += lines->length;
        p = end;
    } else if (!(p = passed_value(s, p, 2))) {
        return NULL;
    }
    found->start = begin - s->data;
    found->length = p - begin;
    return p;
}

/* One line, up to its line feed or the end of the data; what it adds counts only after `commit`. */
static place record(scanner *s, place p, int64_t line)
{
    columns *out = s->out;
    range id = {0, ABSENT}, from = {0, ABSENT}, defined = {0, ABSENT}, lines = {0, ABSENT};
    other_key others[MAX_OTHER_KEYS];
    int other_count = 0;
    unsigned seen = 0;
    if (!(p = after(s, p, '{'))) return NULL;
    for (int more = 1; more;) {
        unsigned key = 0;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("messages", MESSAGES)
        else KEY("id", ID)
        else KEY("source", SOURCE)
        else KEY("tools", TOOLS)
        else KEY("messages_json", RAW_MESSAGES)
        p = key ? noted(s, p, key, &seen) : unknown_key(s, p, others, &other_count);
        if (!p) return NULL;
        switch (key) {
        case MESSAGES: p = messages(s, p); break;
        case ID: p = text_or_null(s, p, &id); break;
        case SOURCE: p = source(s, p, &from); break;
        case TOOLS: p = tools(s, p, &defined, &lines); break;
        case RAW_MESSAGES: return NULL; /* Harmony rows may hold their messages in there */
        default: p = passed_value(s, p, 2);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    p = space(s, p);
    if (!(seen & MESSAGES) || (p < s->stop && *p != '\n')) return NULL;
    out->id_starts[line] = id.start;
    out->id_lengths[line] = id.length;
    out->source_starts[line] = from.start;
    out->source_lengths[line] = from.length;
    out->tools_starts[line] = defined.start;
    out->tools_lengths[line] = defined.length;
    out->listed_starts[line] = lines.start;
    out->listed_lengths[line] = lines.length;
    return p;
}

/* What a line that was read adds for good. */
static void commit(scanner *s, int64_t line)
{
    columns *out = s->out;
    const range from = {out->source_starts[line], out->source_lengths[line]};
    if (from.length > 0 && from.start >= out->text_bytes) s->sources[s->source_count++ % KNOWN_SOURCES] = from;
    out->messages = s->messages;
    out->calls = s->calls;
    out->text_bytes = s->used;
    out->listed_bytes = s->listed;
}

static void decline(scanner *s, int64_t line)
{
    columns *out = s->out;
    s->messages = out->messages;
    s->calls = out->calls;
    s->used = out->text_bytes;
    s->listed = out->listed_bytes;
    out->id_starts[line] = out->source_starts[line] = out->tools_starts[line] = out->listed_starts[line] = 0;
    out->id_lengths[line] = out->source_lengths[line] = out->tools_lengths[line] = out->listed_lengths[line] = ABSENT;
}

/* Lines in a range, the last of which may lack its line feed. */
EXPORT int64_t chatmill_count_lines(place data, int64_t start, int64_t stop)
{
    int64_t count = 0;
    for (place p = data + start, end = data + stop; p < end; count++) {
        const place feed = memchr(p, '\n', (size_t)(end - p));
        p = feed ? feed + 1 : end;
    }
    return count;
}

/* All lines in data[start:stop] into the columns. Returns how many, or -1 where there are more than the capacity. */
EXPORT int64_t chatmill_scan(place data, int64_t start, int64_t stop, columns *out)
{
    scanner s = {.out = out, .data = data, .stop = data + stop};
    out->lines = out->messages = out->calls = out->text_bytes = out->listed_bytes = 0;
    out->message_offsets[0] = out->call_offsets[0] = 0;
    place p = data + start;
    while (p < s.stop) {
        if (out->lines >= out->line_capacity) return -1;
        const int64_t line = out->lines++;
        const place begin = p, end = record(&s, p, line);
        out->line_starts[line] = begin - data;
        out->read[line] = end != NULL;
        if (end) {
            commit(&s, line);
            p = end < s.stop ? end + 1 : end;
        } else {
            decline(&s, line);
            p = memchr(begin, '\n', (size_t)(s.stop - begin));
            p = p ? p + 1 : s.stop;
        }
        out->line_stops[line] = p - data;
        out->message_offsets[line + 1] = out->messages;
    }
    return out->lines;
}

/* Bodies of JSON strings, one for each pair of starts and stops (behind the opening quote, at the closing one), without
 * their escapes one behind the other in `text`, which has room for all bodies as they are and SLACK bytes more. The
 * length of one that is no such body, or has another quote in it, is ABSENT. Returns the bytes of all texts. */
#define SLACK 32

EXPORT int64_t chatmill_unescape(place data, int64_t size, const int64_t *starts, const int64_t *stops, int64_t count,
                                 uint8_t *text, int64_t *text_starts, int64_t *text_lengths)
{
    columns out = {.text = text};
    scanner s = {.out = &out, .data = data};
    for (int64_t i = 0; i < count; i++) {
        const int64_t start = starts[i], stop = stops[i];
        text_starts[i] = s.used;
        text_lengths[i] = ABSENT;
        if (start < 0 || start > stop || stop >= size) continue;
        s.stop = data + (size - stop > 4 ? stop + 4 : size); /* a character is looked at four bytes at a time */
        int64_t length;
        if (string(&s, data + start, &length) != data + stop + 1) continue;
        text_lengths[i] = length;
        s.used += length;
    }
    return s.used;
}
