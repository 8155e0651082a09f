/* Hashes of texts, and words of eight bytes that say what is in a text. */

#define ONES UINT64_C(0x0101010101010101)
#define HIGHS UINT64_C(0x8080808080808080)

static inline uint64_t mixed(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

/* A hash of a text; `high` says whether it has a byte above 0x7F. */
static inline uint64_t hash_of(const uint8_t *text, int64_t length, uint8_t *high)
{
    uint64_t hash = mixed(0, (uint64_t)length), lanes[4] = {1, 2, 3, 4}, word = 0, bits = 0;
    int64_t at = 0;
    for (; length - at >= 32; at += 32) { /* four at once: each waits for the one before it in its lane alone */
        uint64_t words[4];
        memcpy(words, text + at, 32);
        for (int k = 0; k < 4; k++) lanes[k] = mixed(lanes[k], words[k]);
        bits |= words[0] | words[1] | words[2] | words[3];
    }
    for (int k = 0; at && k < 4; k++) hash = mixed(hash, lanes[k]);
    for (; length - at >= 8; at += 8) {
        memcpy(&word, text + at, 8);
        hash = mixed(hash, word);
        bits |= word;
    }
    word = 0;
    if (at < length) memcpy(&word, text + at, (size_t)(length - at));
    *high = ((bits | word) & HIGHS) != 0;
    return mixed(hash, word);
}
