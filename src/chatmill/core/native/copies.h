/* Copies of many short ranges, the places of a mark, and the tokens at which bytes lie (gather.py, text_ranges.py).
 *
 * Most ranges are a few bytes: where both sides have 16 bytes of room, 16 are copied whatever the length, since a copy
 * of a fixed size costs less than asking for the length; the next range then overwrites what was too much.
 */

static inline int is_outside(int64_t start, int64_t length, int64_t size)
{
    return start < 0 || length < 0 || start > size || length > size - start;
}

/* Copies `bytes` bytes to if there are `room`, from if there are `left`. */
static inline void copy_range(uint8_t *to, int64_t room, const uint8_t *from, int64_t left, int64_t bytes)
{
    if (bytes <= 16 && left >= 16 && room >= 16) {
        memcpy(to, from, 16);
    } else if (bytes > 0) {
        memcpy(to, from, (size_t)bytes);
    }
}

/* Ranges one after another into `out` (which holds `room` bytes); items are `item` bytes, as are starts, lengths and
 * sizes counted. Returns how many bytes were written, or -1 where a range lies outside its buffer or `out` is full. */
EXPORT int64_t chatmill_gather(const uint8_t *const *buffers, const int64_t *sizes, int64_t buffer_count,
                               const uint8_t *which, const int64_t *starts, const int64_t *lengths, int64_t count,
                               int64_t item, uint8_t *out, int64_t room)
{
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t buffer = which[i];
        if (buffer >= buffer_count) return -1;
        const int64_t start = starts[i], length = lengths[i], size = sizes[buffer];
        if (is_outside(start, length, size)) return -1;
        const int64_t bytes = length * item;
        if (bytes > room - at) return -1;
        copy_range(out + at, room - at, buffers[buffer] + start * item, (size - start) * item, bytes);
        at += bytes;
    }
    return at;
}

/* Where a mark of `length` bytes begins in the data. Returns how often it stands there; the first `room` places of
 * these are written to `out`. */
EXPORT int64_t chatmill_find(const uint8_t *data, int64_t size, const uint8_t *mark, int64_t length, int64_t *out,
                             int64_t room)
{
    int64_t count = 0;
    const uint8_t *p = data, *const stop = data + size;
    while (stop - p >= length && (p = memchr(p, mark[0], (size_t)(stop - p - length + 1)))) {
        if (memcmp(p, mark, (size_t)length)) {
            p++;
            continue;
        }
        if (count < room) out[count] = p - data;
        count++;
        p += length;
    }
    return count;
}

#define PAIRS_AHEAD 8

/* For each pair of a text and a number of bytes, the first token of the text with at least so many bytes before it, or
 * the text's end. Tokens are `offsets[text]` to `offsets[text + 1]` of the ids, each as long as `sizes` says. Pairs of one text cost one
 * walk if they are in order. Returns `count`, or -1 where a number lies outside its array. */
EXPORT int64_t chatmill_points(const int32_t *ids, int64_t id_count, const int32_t *sizes, int64_t vocabulary,
                               const int64_t *offsets, int64_t texts, const int64_t *which, const int64_t *bytes,
                               int64_t count, int64_t *points)
{
    int64_t text = -1, at = 0, stop = 0, passed = 0, wanted = 0;
    for (int64_t i = 0; i < count; i++) {
        if (which[i] < 0 || which[i] >= texts) return -1;
        if (i + PAIRS_AHEAD < count && (uint64_t)which[i + PAIRS_AHEAD] < (uint64_t)texts) {
            PREFETCH((const void *)((uintptr_t)ids + 4 * (uintptr_t)offsets[which[i + PAIRS_AHEAD]]));
        }
        if (which[i] != text || bytes[i] < wanted) {
            text = which[i];
            at = offsets[text];
            stop = offsets[text + 1];
            if (at < 0 || at > stop || stop > id_count) return -1;
            passed = 0;
        }
        wanted = bytes[i];
        while (at < stop && passed < wanted) {
            const int32_t id = ids[at++];
            if (id < 0 || id >= vocabulary) return -1;
            passed += sizes[id];
        }
        points[i] = at;
    }
    return count;
}
