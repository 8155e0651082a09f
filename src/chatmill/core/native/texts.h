/* Questions about many texts (text_ranges.py): which are not ASCII, how many characters they have, and where they begin
 * and end without what is trimmed off. */

/* Whether each text has a byte above 0x7F. Returns `count`, or -1 where a text lies outside of the data. */
EXPORT int64_t chatmill_not_ascii(const uint8_t *data, int64_t size, const int64_t *starts, const int64_t *lengths,
                                  int64_t count, uint8_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (is_outside(starts[i], lengths[i], size)) return -1;
        const uint8_t *p = data + starts[i], *const stop = p + lengths[i];
        uint64_t high = 0;
        for (; stop - p >= 64 && !high; p += 64) {
            uint64_t words[8];
            memcpy(words, p, 64);
            for (int k = 0; k < 8; k++) high |= words[k] & HIGHS;
        }
        for (; p < stop && !high; p++) high = *p & 0x80;
        out[i] = high != 0;
    }
    return count;
}

/* The code point of the character at `p`, whose bytes up to `stop` are well-formed UTF-8, and where it ends; -1 where
 * they are not all there. */
static inline int32_t code_point(const uint8_t *p, const uint8_t *stop, const uint8_t **end)
{
    const int bytes = *p < 0x80 ? 1 : *p < 0xE0 ? 2 : *p < 0xF0 ? 3 : 4;
    if (stop - p < bytes) return -1;
    *end = p + bytes;
    int32_t point = bytes == 1 ? *p : *p & (0x7F >> bytes);
    for (int k = 1; k < bytes; k++) point = (point << 6) | (p[k] & 0x3F);
    return point;
}

/* Whether each text has a character that is not ASCII and in none of `range_count` ranges of code points (the first
 * and the last one of each, in order). Returns `count`, or -1 where a text lies outside of the data. */
EXPORT int64_t chatmill_other_characters(const uint8_t *data, int64_t size, const int64_t *starts,
                                         const int64_t *lengths, int64_t count, const int64_t *ranges,
                                         int64_t range_count, uint8_t *out)
{
    int64_t last = 0; /* texts mostly stay in one range */
    for (int64_t i = 0; i < count; i++) {
        if (is_outside(starts[i], lengths[i], size)) return -1;
        const uint8_t *p = data + starts[i], *const stop = p + lengths[i];
        out[i] = 0;
        while (p < stop && !out[i]) {
            uint64_t word;
            if (*p < 0x80 && stop - p >= 8 && (memcpy(&word, p, 8), !(word & HIGHS))) {
                p += 8;
                continue;
            }
            if (*p < 0x80) {
                p++;
                continue;
            }
            const int32_t point = code_point(p, stop, &p);
            if (point >= 0 && last < range_count && ranges[2 * last] <= point && point <= ranges[2 * last + 1]) continue;
            for (last = 0; last < range_count && point > ranges[2 * last + 1]; last++) {}
            out[i] = point < 0 || last == range_count || point < ranges[2 * last];
        }
    }
    return count;
}

/* Code points of each text. Returns as above. */
EXPORT int64_t chatmill_characters(const uint8_t *data, int64_t size, const int64_t *starts, const int64_t *lengths,
                                   int64_t count, int64_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (is_outside(starts[i], lengths[i], size)) return -1;
        const uint8_t *const text = data + starts[i];
        int64_t characters = 0;
        for (int64_t k = 0; k < lengths[i]; k++) characters += (text[k] & 0xC0) != 0x80;
        out[i] = characters;
    }
    return count;
}

/* Bytes of the white space of several bytes that is at `p`: one of `wide`, each with its length in front. */
static inline int wide_space(const uint8_t *p, int64_t room, const uint8_t *wide, int64_t wide_size)
{
    for (int64_t at = 0; at < wide_size; at += 1 + wide[at]) {
        if (wide[at] <= room && !memcmp(p, wide + at + 1, wide[at])) return wide[at];
    }
    return 0;
}

#define AHEAD 16 /* texts */

enum { AT_BEGIN = 1, AT_END = 2 };

/* Texts without the bytes that `trims` says at their beginning, at their end (`sides`), and without the `wide` white
 * space there. Texts are UTF-8, so the last bytes of a text are a wide space only where they are that character.
 * Returns as above. */
EXPORT int64_t chatmill_trim(const uint8_t *data, int64_t size, const int64_t *starts, const int64_t *lengths,
                             int64_t count, const uint8_t *trims, const uint8_t *wide, int64_t wide_size, int64_t sides,
                             int64_t *begins, int64_t *sizes)
{
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) { /* an address that is never read: it may lie anywhere */
            const uintptr_t ahead = (uintptr_t)data + (uintptr_t)starts[i + AHEAD];
            PREFETCH((const void *)ahead);
            PREFETCH((const void *)(ahead + (uintptr_t)lengths[i + AHEAD]));
        }
        if (is_outside(starts[i], lengths[i], size)) return -1;
        const uint8_t *first = data + starts[i], *last = first + lengths[i];
        for (int step = 1; (sides & AT_BEGIN) && first < last && step; first += step) {
            step = trims[*first] ? 1 : *first < 0x80 ? 0 : wide_space(first, last - first, wide, wide_size);
        }
        for (int step = 1; (sides & AT_END) && first < last && step; last -= step) {
            step = trims[last[-1]];
            if (step || last[-1] < 0x80) continue;
            for (int64_t bytes = 2; bytes <= 3 && bytes <= last - first && !step; bytes++) {
                if (wide_space(last - bytes, bytes, wide, wide_size) == bytes) step = (int)bytes;
            }
        }
        begins[i] = first - data;
        sizes[i] = last - first;
    }
    return count;
}
