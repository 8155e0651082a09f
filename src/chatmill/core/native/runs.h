/* What the runs of tokens add up to (run_sums.py). */

#define PART_COUNT 8 /* as in kinds.py, like the next three */
#define PLAIN_KIND 63
#define TERMINATOR_PART 5
#define ROLE_COUNT 6

/* Adds the lengths of runs to `sums`, by the code of their conversation, their role, and whether they are trained.
 * Returns `runs`, or -1 where a number lies outside its array. */
EXPORT int64_t chatmill_sum_lengths(const uint8_t *kinds, const int64_t *lengths, const float *weights, int64_t runs,
                                    const int64_t *firsts, const int64_t *codes, int64_t conversations, int64_t count,
                                    int64_t *sums)
{
    for (int64_t c = 0; c < conversations; c++) {
        const int64_t first = firsts[c], last = firsts[c + 1];
        if (codes[c] < 0 || codes[c] >= count || first < 0 || first > last || last > runs) return -1;
        int64_t *const own = sums + codes[c] * ROLE_COUNT * 2;
        for (int64_t r = first; r < last; r++) {
            const int role = (kinds[r] & PLAIN_KIND) / PART_COUNT;
            if (role >= ROLE_COUNT) return -1;
            own[role * 2 + (weights[r] > 0)] += lengths[r];
        }
    }
    return runs;
}

/* Of each conversation: its trained tokens, the messages of the assistant, and those that are trained although their
 * terminator is not. A message whose last run another one of the assistant follows at once needs none. Returns as
 * above. */
EXPORT int64_t chatmill_sum_turns(const uint8_t *kinds, const int32_t *messages, const int64_t *lengths,
                                  const float *weights, int64_t runs, const int64_t *firsts, int64_t conversations,
                                  int64_t *trained, int64_t *turns, int64_t *unended)
{
    for (int64_t c = 0; c < conversations; c++) {
        const int64_t first = firsts[c], last = firsts[c + 1];
        if (first < 0 || first > last || last > runs) return -1;
        int64_t tokens = 0, count = 0, open = 0;
        int is_trained = 0, is_ended = 0; /* the message at hand */
        int follows = 0;                  /* whether the last run was one of the assistant */
        int32_t message = 0;
        for (int64_t r = first; r < last; r++) {
            if (!lengths[r]) continue;
            const int counts = weights[r] > 0;
            tokens += counts ? lengths[r] : 0;
            if ((kinds[r] & PLAIN_KIND) / PART_COUNT != ASSISTANT) {
                follows = 0;
                continue;
            }
            if (!count || messages[r] != message) {
                open += is_trained && !is_ended && !follows;
                count++;
                is_trained = is_ended = 0;
                message = messages[r];
            }
            is_trained |= counts;
            is_ended |= counts && kinds[r] % PART_COUNT == TERMINATOR_PART;
            follows = 1;
        }
        trained[c] = tokens;
        turns[c] = count;
        unended[c] = open + (is_trained && !is_ended);
    }
    return runs;
}
