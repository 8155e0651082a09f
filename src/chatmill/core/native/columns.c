/* Loops over single bytes that NumPy cannot express: copies of many short ranges, and JSONL chats read into columns.
 *
 * Plain C11 without Python's headers; `library.py` loads it, and tests compare every function with a slow one in Python
 * (tests/oracles.py), those of `replay.h` with templates that are run in Python. A function that meets
 * what it does not expect says so.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define ABI_VERSION 29 /* the same number as in library.py: change both whenever a signature or a struct changes */

_Static_assert(sizeof(void *) == sizeof(int64_t), "library.py writes structs as words of 8 bytes");

#ifndef SOURCE_CHECKSUM
#define SOURCE_CHECKSUM 0 /* of these files, given by the build, so that a test can tell a library of an older source */
#endif

#include "lists.h"
#include "copies.h"
#include "hashes.h"
#include "json.h"
#include "equal.h"
#include "texts.h"
#include "trees.h"
#include "layout.h"
#include "replay.h"
#include "branches.h"
#include "listed.h"
#include "names.h"
#include "messages.h"
#include "records.h"

EXPORT int64_t chatmill_abi_version(void) { return ABI_VERSION; }

EXPORT int64_t chatmill_source_checksum(void) { return SOURCE_CHECKSUM; }

/* What a record adds for good. */
static void commit(scanner *s, int64_t line)
{
    columns *out = s->out;
    const range from = {out->sources.starts[line], out->sources.lengths[line]};
    if (from.length > 0 && from.start >= out->text_bytes) s->known_sources[s->source_count++ % KNOWN_SOURCES] = from;
    out->messages = s->at.messages;
    out->calls = s->at.calls;
    out->rares = s->at.rares;
    out->weight_count = s->at.weights;
    out->text_bytes = s->at.text;
    out->json_bytes = s->at.json;
    out->unused_count = s->at.unused;
    out->extra_count = s->at.extras;
    out->score_count = s->at.scores;
}

/* Makes one record without anything of a line. */
static void decline(scanner *s, int64_t line)
{
    columns *out = s->out;
    const range none = {0, ABSENT};
    s->at = (counts){out->messages,   out->calls,      out->rares,       out->weight_count,
                     out->text_bytes, out->json_bytes, out->unused_count, out->extra_count,
                     out->score_count};
    texts *const of_line[] = {&out->ids, &out->sources, &out->tools, &out->listed, &out->options};
    for (int i = 0; i < 5; i++) set_text(of_line[i], line, none);
    out->message_offsets[line + 1] = out->messages;
    out->lines = line + 1;
}

/* The record that begins at `p`, up to a line feed or the end; of a text, up to the end alone. NULL where it is
 * declined. */
static place line_at(scanner *s, place p, int is_text)
{
    const int64_t line = s->out->lines;
    s->keys->count = 0;
    if ((p = record(s, p))) p = space(s, p);
    if (!p || (p < s->stop && (is_text || *p != '\n'))) {
        decline(s, line);
        return NULL;
    }
    commit(s, line);
    return p;
}

/* Notes where the record of a line is. */
static void note_line(columns *out, int64_t line, int64_t start, int64_t stop, int is_read)
{
    out->line_starts[line] = start;
    out->line_stops[line] = stop;
    out->read[line] = (uint8_t)is_read;
}

/* A scanner with nothing read yet; the counts of what is written are 0. */
static scanner begun(place data, shape *names, columns *out, passed_keys *keys)
{
    out->unused_count = out->extra_count = out->score_count = 0;
    out->lines = out->messages = out->calls = out->rares = out->weight_count = out->text_bytes = out->json_bytes = 0;
    out->message_offsets[0] = out->call_offsets[0] = 0;
    scanner s = {.out = out, .names = names, .data = data, .keys = keys, .last_role = &names->of_role.start};
    for (int i = 0; i < names->of_record.count; i++) {
        const int meaning = names->of_record.names[i].meaning, turn = (meaning - TURN) / MAX_JOINED;
        s.is_optional |= meaning == QUESTION;
        if (meaning >= TURN && turn >= s.turns) s.turns = turn + 1;
    }
    return s;
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

/* All lines in data[start:stop] into the columns. Returns how many, or -1 if there are more than the capacity or than
 * MAX_NAMES names of a kind. */
EXPORT int64_t chatmill_scan(place data, int64_t start, int64_t stop, const shape_names *names, columns *out)
{
    shape table;
    passed_keys keys;
    int64_t count = 0;
    if (!fill_shape(&table, names)) return -1;
    scanner s = begun(data, &table, out, &keys);
    s.stop = data + stop;
    for (place p = data + start; p < s.stop; count++) {
        if (count >= out->line_capacity) return -1;
        const place begin = p, end = line_at(&s, p, 0);
        p = end ? end : memchr(begin, '\n', (size_t)(s.stop - begin));
        p = p && p < s.stop ? p + 1 : s.stop;
        note_line(out, count, begin - data, p - data, end != NULL);
    }
    return count;
}

/* One record from each range between two of `count` + 1 offsets into the data. Returns `count`, or -1 as above or where
 * an offset lies outside of the data. */
EXPORT int64_t chatmill_scan_texts(place data, int64_t size, const int64_t *offsets, int64_t count,
                                   const shape_names *names, columns *out)
{
    shape table;
    passed_keys keys;
    if (!fill_shape(&table, names) || count > out->line_capacity) return -1;
    scanner s = begun(data, &table, out, &keys);
    for (int64_t line = 0; line < count; line++) {
        const int64_t start = offsets[line], stop = offsets[line + 1];
        if (start < 0 || start > stop || stop > size) return -1;
        s.stop = data + stop;
        const place end = line_at(&s, data + start, 1);
        note_line(out, line, start, stop, end != NULL);
    }
    return count;
}

/* Whether nothing of a JSON value can be lost where it is decoded: no key stands twice in an object, and every number is
 * surely one that float64 holds. `text` has room for `size` bytes. Where that is not sure, or the value is no JSON, 0. */
EXPORT int64_t chatmill_is_exact(place data, int64_t size, uint8_t *text)
{
    passed_keys keys = {.count = 0};
    columns out = {.text = text, .text_capacity = size};
    scanner s = {.out = &out, .data = data, .stop = data + size, .keys = &keys};
    const place p = passed_value(&s, space(&s, data), 0);
    return p && space(&s, p) == s.stop;
}
