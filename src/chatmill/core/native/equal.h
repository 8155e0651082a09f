/* Equal texts: numbered alike (text_ranges.py), and put together of parts and kept once (gather.py). */

/* Numbers texts so that equal ones have one number: 0, 1, ... in the order in which they are met; `firsts` says where.
 * `table` has `slots` numbers (a power of two, more than `count`), all of them -1. Returns how many different texts there
 * are, or -1 where one lies outside of the data. */
EXPORT int64_t chatmill_distinct(const uint8_t *data, int64_t size, const int64_t *starts, const int64_t *lengths,
                                 int64_t count, int64_t *which, int64_t *firsts, int64_t *table, int64_t slots)
{
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t start = starts[i], length = lengths[i];
        if (is_outside(start, length, size)) return -1;
        const uint8_t *const text = data + start;
        uint8_t high;
        int64_t slot = (int64_t)(hash_of(text, length, &high) & (uint64_t)(slots - 1)), number;
        while ((number = table[slot]) >= 0) {
            const int64_t first = firsts[number];
            if (lengths[first] == length && !memcmp(data + starts[first], text, (size_t)length)) break;
            slot = (slot + 1) & (slots - 1);
        }
        if (number < 0) {
            number = table[slot] = found++;
            firsts[number] = i;
        }
        which[i] = number;
    }
    return found;
}

/* Puts parts together to pieces, a new one at each part that opens one, and writes every different piece once: number k
 * between offsets[k] and offsets[k + 1] of `out`, which has `room` bytes; `highs[k]` says whether it has a byte above
 * 0x7F. Of each part `numbers` gets the number of its piece, and `before` the bytes before it there. `table` is as above,
 * for the pieces. Returns how many different pieces there are, or -1 where a part lies outside of its buffer or there is
 * no room. */
EXPORT int64_t chatmill_pieces(const uint8_t *const *buffers, const int64_t *sizes, int64_t buffer_count,
                               const uint8_t *which, const int64_t *starts, const int64_t *lengths,
                               const uint8_t *opens, int64_t parts, uint8_t *out, int64_t room, int64_t *numbers,
                               int64_t *before, int64_t *offsets, uint8_t *highs, int64_t *table, int64_t slots)
{
    int64_t found = 0, end = 0; /* of the pieces that are kept */
    offsets[0] = 0;
    for (int64_t i = 0; i < parts;) {
        const int64_t first = i;
        int64_t length = 0;
        do {
            const int64_t buffer = which[i];
            if (buffer >= buffer_count || is_outside(starts[i], lengths[i], sizes[buffer])) return -1;
            const int64_t left = room - end - length;
            if (lengths[i] > left) return -1;
            copy_range(out + end + length, left, buffers[buffer] + starts[i], sizes[buffer] - starts[i], lengths[i]);
            before[i] = length;
            length += lengths[i];
        } while (++i < parts && !opens[i]);
        uint8_t high;
        const uint8_t *const piece = out + end;
        int64_t slot = (int64_t)(hash_of(piece, length, &high) & (uint64_t)(slots - 1)), number;
        while ((number = table[slot]) >= 0) {
            const int64_t start = offsets[number];
            if (offsets[number + 1] - start == length && !memcmp(out + start, piece, (size_t)length)) break;
            slot = (slot + 1) & (slots - 1);
        }
        if (number < 0) {
            number = table[slot] = found++;
            highs[number] = high;
            end += length;
            offsets[found] = end;
        }
        for (int64_t k = first; k < i; k++) numbers[k] = number;
    }
    return found;
}
