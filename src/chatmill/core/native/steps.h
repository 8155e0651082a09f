/* Steps of trajectories (ATIF): each is a message, and after it come those that its observation holds. */

/* Into an object; `more` says whether there is something in it. */
static place opened(const scanner *s, place p, int *more)
{
    if (!(p = after(s, p, '{'))) return NULL;
    *more = p == s->stop || *p != '}';
    return *more ? p : p + 1;
}

enum { STEP_CALL_ID = 1, STEP_CALL_NAME = 2, STEP_ARGUMENTS = 4 };

static place step_call(scanner *s, place p)
{
    columns *out = s->out;
    if (s->at.calls >= out->call_capacity) return NULL;
    const int64_t number = s->at.calls++, first_key = s->keys->count;
    unsigned seen = 0;
    range id = {0, ABSENT}, called = id, given = id;
    for (int more = 1; more;) {
        unsigned key = 0;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("tool_call_id", STEP_CALL_ID)
        else KEY("function_name", STEP_CALL_NAME)
        else KEY("arguments", STEP_ARGUMENTS)
        if (key && !(p = noted(s, p, key, &seen))) return NULL;
        switch (key) {
        case STEP_CALL_ID: p = text_or_null(s, p, &id); break;
        case STEP_CALL_NAME: p = text_or_null(s, p, &called); break;
        case STEP_ARGUMENTS: p = arguments(s, p, &given); break;
        default: p = passed_of_message(s, p, first_key);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    set_text(&out->call_ids, number, id);
    set_text(&out->call_names, number, called);
    set_text(&out->call_arguments, number, given);
    out->call_orders[number] = 0;
    return called.length >= 0 && given.length >= 0 ? p : NULL;
}

enum { STEP_SENT = 1, STEP_SAMPLED = 2, STEP_LOGPROBS = 4 };

/* The tokens of a step; without those that were sampled the others say nothing. */
static place metrics(scanner *s, place p, message_parts *m)
{
    const int64_t first_key = s->keys->count;
    unsigned seen = 0;
    int more;
    if (IS(s, p, "null")) return p + 4;
    for (p = opened(s, p, &more); p && more;) {
        unsigned key = 0;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("prompt_token_ids", STEP_SENT)
        else KEY("completion_token_ids", STEP_SAMPLED)
        else KEY("logprobs", STEP_LOGPROBS)
        if (key && !(p = noted(s, p, key, &seen))) return NULL;
        switch (key) {
        case STEP_SENT: p = numbers(s, p, PROMPT_TOKEN_IDS, &m->sent); break;
        case STEP_SAMPLED: p = numbers(s, p, TOKEN_IDS, &m->sampled); break;
        case STEP_LOGPROBS: p = numbers(s, p, LOGPROBS, &m->logprobs); break;
        default: p = passed_member(s, p, first_key);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    if (m->sampled.length < 0) m->sent.length = m->logprobs.length = ABSENT;
    return p;
}

/* The function that a call with this id, which may be none, has called: of several the last one. */
static range called_by(const scanner *s, range id)
{
    const columns *out = s->out;
    for (int64_t call = s->at.calls; call-- > s->first_call;) {
        const range known = {out->call_ids.starts[call], out->call_ids.lengths[call]};
        const int is_same = known.length == id.length
            && (id.length <= 0 || !memcmp(out->text + known.start, out->text + id.start, (size_t)id.length));
        if (is_same) return (range){out->call_names.starts[call], out->call_names.lengths[call]};
    }
    return (range){0, ABSENT};
}

/* A reference to a subagent; one without an id is to a file. */
static place referred(scanner *s, place p)
{
    const int64_t first_key = s->keys->count;
    unsigned seen = 0;
    range id = {0, ABSENT};
    for (int more = 1; more;) {
        unsigned key = 0;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("trajectory_id", 1)
        if (key && !(p = noted(s, p, key, &seen))) return NULL;
        p = key ? text_or_null(s, p, &id) : passed_member(s, p, first_key);
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    if (id.length < 0) return p;
    if (s->reference_count == MAX_HELD) return NULL;
    s->references[s->reference_count++] = (reference){id, s->step};
    return p;
}

enum { RESULT_CONTENT = 1, RESULT_CALL = 2, RESULT_REFERENCES = 4 };

/* What came back: the result of a call, or, where nothing was called, what the environment says to the agent. */
static place result(scanner *s, place p)
{
    columns *out = s->out;
    if (s->at.messages >= out->message_capacity) return NULL;
    const int64_t number = s->at.messages++, calls = s->at.calls - s->first_call, first_key = s->keys->count;
    message_parts m = no_parts(calls ? TOOL : USER);
    unsigned seen = 0;
    range id = {0, ABSENT};
    for (int more = 1; more;) {
        unsigned key = 0;
        if (p == s->stop || *p++ != '"') return NULL;
        KEY("content", RESULT_CONTENT)
        else KEY("source_call_id", RESULT_CALL)
        else KEY("subagent_trajectory_ref", RESULT_REFERENCES)
        if (key && !(p = noted(s, p, key, &seen))) return NULL;
        switch (key) {
        case RESULT_CONTENT: p = message_field(s, p, number, CONTENT, &m); break;
        case RESULT_CALL: p = text_or_null(s, p, &id); break;
        case RESULT_REFERENCES: p = objects_or_none(s, p, referred); break;
        default: p = passed_of_message(s, p, first_key);
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    if (calls) {
        if (calls == 1 && id.length < 0) {
            id = (range){out->call_ids.starts[s->first_call], out->call_ids.lengths[s->first_call]};
        }
        if (!add_rare(s, number, TOOL_CALL_ID, id) || !add_rare(s, number, NAME, called_by(s, id))) return NULL;
    }
    return ended(s, number, m.content.length >= 0, &m) ? p : NULL;
}

/* A step from after its opening bracket. Its observation is read last, since its calls may come after it. */
static place step(scanner *s, place p)
{
    if (s->at.messages >= s->out->message_capacity) return NULL;
    const int64_t number = s->at.messages++, first_key = s->keys->count;
    message_parts m = no_parts(0);
    unsigned seen = 0;
    place observed = NULL;
    name *key = &s->names->of_message.start;
    s->first_call = s->at.calls;
    s->step++;
    for (int more = 1; more;) {
        if (p == s->stop || *p++ != '"') return NULL;
        if (!name_at(s, p, &s->names->of_message, &key)) {
            p = passed_of_message(s, p, first_key);
        } else if ((p = noted(s, p + key->length, key->bit, &seen))) {
            switch (key->meaning) {
            case TOOL_CALLS: p = objects_or_none(s, p, step_call); break;
            case METRICS: p = metrics(s, p, &m); break;
            case OBSERVATION: p = IS(s, p, "null") ? p + 4 : only_value(s, p, "results\"", &observed); break;
            default: p = message_field(s, p, number, key->meaning, &m);
            }
        }
        if (!p || !(p = separator(s, p, '}', &more))) return NULL;
    }
    s->keys->count = first_key;
    const int has_calls = s->at.calls > s->first_call, is_sampled = m.sampled.length >= 0;
    const int is_context = m.train == 1 || m.weight == 0; /* the names of a step: it was copied, and by how many calls */
    if (m.role != ASSISTANT && (has_calls || is_sampled || m.reasoning.length >= 0)) return NULL;
    if (is_sampled && m.weight > 1) return NULL;
    m.weight = -1;
    m.train = is_context && m.role == ASSISTANT ? 0 : -1;
    if (!ended(s, number, m.content.length >= 0 || has_calls, &m)) return NULL;
    const int64_t messages = s->at.messages;
    if (observed && !objects_or_none(s, observed, result)) return NULL;
    return m.role == ASSISTANT || s->at.messages == messages ? p : NULL;
}
