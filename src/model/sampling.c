/* sampling.c - see sampling.h. */
#include "model/sampling.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

/* Each setting by its names: in Hugging Face's files, in GGUF (as llama.cpp's converter
 * writes it), in still.json. */
static const struct setting {
    const char *folder, *gguf, *still;
    size_t at;
    bool whole;
    double lo, hi;
} settings[] = {
    {"temperature", "general.sampling.temp", "temp",
     offsetof(still_sampler_params, temperature), false, 0, 100},
    {"top_k", "general.sampling.top_k", "top_k", offsetof(still_sampler_params, top_k),
     true, 0, 1 << 24},
    {"top_p", "general.sampling.top_p", "top_p", offsetof(still_sampler_params, top_p),
     false, 0, 1},
    {"min_p", "general.sampling.min_p", "min_p", offsetof(still_sampler_params, min_p),
     false, 0, 1},
    {"repetition_penalty", "general.sampling.penalty_repeat", "repeat_penalty",
     offsetof(still_sampler_params, repeat_penalty), false, 0.01, 100},
    {NULL, "general.sampling.penalty_last_n", "repeat_last",
     offsetof(still_sampler_params, repeat_last), true, 1, 1 << 20},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static double get(const still_sampler_params *p, const struct setting *s)
{
    const char *at = (const char *)p + s->at;
    float real;
    int whole;
    memcpy(&real, at, sizeof real);
    memcpy(&whole, at, sizeof whole);
    return s->whole ? whole : (double)real;
}

static void set(still_sampler_params *p, const struct setting *s, double v)
{
    char *at = (char *)p + s->at;
    const float real = (float)v;
    if (!(v >= s->lo && v <= s->hi)) return;
    const int whole = (int)v;
    if (s->whole)
        memcpy(at, &whole, sizeof whole);
    else
        memcpy(at, &real, sizeof real);
}

still_sampler_params sti_sampling_none(void)
{
    return STILL_PARAMS(still_sampler_params, .temperature = -1, .top_k = -1,
                        .top_p = -1, .min_p = -1, .repeat_penalty = -1,
                        .repeat_last = -1);
}

void sti_sampling_of_json(const json_t *o, still_sampler_params *out)
{
    *out = sti_sampling_none();
    for (int i = 0; i < SETTINGS; i++) {
        const json_t *v = json_object_get(o, settings[i].still);
        if (json_is_number(v)) set(out, &settings[i], json_number_value(v));
    }
}

json_t *sti_sampling_to_json(const still_sampler_params *p)
{
    json_t *o = json_object();
    for (int i = 0; i < SETTINGS; i++) {
        const double v = get(p, &settings[i]);
        if (v >= 0) sti_json_set_real(&o, settings[i].still, v);
    }
    return o;
}

void sti_sampling_override(still_sampler_params *p, const still_sampler_params *more)
{
    for (int i = 0; i < SETTINGS; i++) {
        const double v = get(more, &settings[i]);
        if (v >= 0) set(p, &settings[i], v);
    }
}

static void read_gguf(const sti_store *s, still_sampler_params *out)
{
    for (int i = 0; i < SETTINGS; i++) {
        const sti_meta *m = sti_meta_find(s, settings[i].gguf);
        double v;
        if (m && sti_meta_float(m, &v)) set(out, &settings[i], v);
    }
}

still_status sti_sampling_read(const sti_store *s, still_sampler_params *out,
                               still_error *err)
{
    char path[STI_PATH_ROOM];
    json_t *o;
    *out = sti_sampling_none();
    if (s->is_gguf) read_gguf(s, out);
    if (!s->config) return STILL_OK; /* no folder */
    STI_TRY(sti_path_join(path, s->path, "generation_config.json", err));
    if (access(path, F_OK) && errno == ENOENT) return STILL_OK;
    STI_TRY(sti_json_load(path, &o, err));
    for (int i = 0; i < SETTINGS; i++) {
        const json_t *v =
            settings[i].folder ? json_object_get(o, settings[i].folder) : NULL;
        if (json_is_number(v)) set(out, &settings[i], json_number_value(v));
    }
    if (json_is_false(json_object_get(o, "do_sample"))) out->temperature = 0;
    json_decref(o);
    return STILL_OK;
}
