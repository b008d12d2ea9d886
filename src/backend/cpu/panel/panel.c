/* panel.c - feature maps as panels; see panel.h. */
#include "backend/cpu/panel/panel.h"

#include <math.h>
#include <string.h>

sti_panel_map_scratch sti_panel_map_carve(sti_carve *c, const sti_hybrid_shape *shape,
                                          bool backward)
{
    const size_t D = (size_t)shape->D, F = (size_t)shape->F;
    const size_t Dp = (size_t)sti_panel_padded(shape->D);
    const size_t Fp = (size_t)sti_panel_padded(shape->F);
    return (sti_panel_map_scratch){
        .W = sti_carve_take(c, D * Fp, sizeof(float)),
        .Wt = backward ? sti_carve_take(c, F * Dp, sizeof(float)) : NULL,
        .edge = sti_carve_take(c, Fp, sizeof(float)),
        .floor_at = sti_carve_take(c, Fp, sizeof(float)),
    };
}

sti_panel_map sti_panel_map_of(const sti_panel_kernels *f,
                               const sti_hybrid_settings *set,
                               const sti_hybrid_shape *shape, const float *W,
                               float bias, const sti_panel_map_scratch *scratch)
{
    const int D = shape->D, F = shape->F;
    sti_panel_map m = {
        .kind = set->map,
        .norm_preserved = set->norm_preserved,
        .D = D,
        .F = F,
        .Dp = sti_panel_padded(D),
        .Fp = sti_panel_padded(F),
        .bias = set->map == STI_MAP_RELU ? bias : 0,
        .edge = scratch->edge,
        .floor_at = scratch->floor_at,
    };
    m.Pp = set->map == STI_MAP_RELU ? m.Fp : 2 * m.Fp;
    for (int i = 0; i < m.Fp; i++) {
        scratch->edge[i] = i < F ? 0 : -INFINITY;
        scratch->floor_at[i] = i < F ? (float)set->feature_floor : 0;
    }
    if (!W) return m;
    const size_t Fp = (size_t)m.Fp;
    for (int i = 0; i < D; i++)
        sti_panel_row(scratch->W + (size_t)i * Fp, W + (size_t)i * (size_t)F, F, m.Fp);
    m.W = scratch->W;
    if (scratch->Wt) f->transpose(scratch->W, Fp, D, F, 1, scratch->Wt, (size_t)m.Dp);
    m.Wt = scratch->Wt;
    return m;
}

void sti_panel_map_rows(const sti_panel_kernels *f, const sti_panel_map *m,
                        const float *x, int rows, float *raw, float *phi)
{
    const size_t Dp = (size_t)m->Dp, Fp = (size_t)m->Fp;
    if (m->W)
        f->multiply(rows, m->Fp, m->D, x, Dp, 1, m->W, Fp, raw, Fp, false);
    else
        for (int r = 0; r < rows; r++)
            sti_panel_row(raw + (size_t)r * Fp, x + (size_t)r * Dp, m->F, m->Fp);
    f->features(m, x, raw, rows, phi);
}

void sti_panel_map_back(const sti_panel_kernels *f, const sti_panel_map *m,
                        const float *draw, int rows, float *dx)
{
    const size_t Dp = (size_t)m->Dp, Fp = (size_t)m->Fp;
    if (m->W)
        f->multiply(rows, m->Dp, m->F, draw, Fp, 1, m->Wt, Dp, dx, Dp, true);
    else /* F <= D, so Fp <= Dp */
        for (int r = 0; r < rows; r++)
            f->add_scaled(dx + (size_t)r * Dp, draw + (size_t)r * Fp, 1, m->Fp);
}
