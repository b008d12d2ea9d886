/* prefix_tree.c - see prefix_tree.h.
 *
 * A node without a past has at least two children: whatever loses its past is taken out or
 * joined with its only child, so there are fewer than twice as many nodes as pasts. */
#include "server/prefix_tree.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct srv_prefix_node {
    srv_prefix_node *parent, *child, *next; /* first child; next of its parent's */
    srv_prefix_node *newer, *older;         /* while it has a past */
    int32_t *id;                            /* [n]: the edge from its parent */
    int n, length; /* tokens of the edge, of all down to here */
    still_snapshot *past;
    bool has_logits;
    bool continued; /* by another past, and not used since */
};

/* ---- Order of use -------------------------------------------------------- */

static void unlink_use(srv_prefix_tree *t, srv_prefix_node *x)
{
    if (t->newest == x)
        t->newest = x->older;
    else
        x->newer->older = x->older;
    if (t->oldest == x)
        t->oldest = x->newer;
    else
        x->older->newer = x->newer;
    x->newer = x->older = NULL;
}

static void link_newest(srv_prefix_tree *t, srv_prefix_node *x)
{
    x->older = t->newest;
    *(t->newest ? &t->newest->newer : &t->oldest) = x;
    t->newest = x;
}

static void link_oldest(srv_prefix_tree *t, srv_prefix_node *x)
{
    x->newer = t->oldest;
    *(t->oldest ? &t->oldest->older : &t->newest) = x;
    t->oldest = x;
}

static void use(srv_prefix_tree *t, srv_prefix_node *x)
{
    x->continued = false;
    unlink_use(t, x);
    link_newest(t, x);
}

/* ---- Nodes --------------------------------------------------------------- */

static size_t node_bytes(const srv_prefix_node *x)
{
    return sizeof *x + (size_t)x->n * sizeof *x->id +
           (x->past ? still_snapshot_bytes(x->past) : 0);
}

static srv_prefix_node *new_node(srv_prefix_tree *t, srv_prefix_node *parent,
                                 const int32_t *id, int n)
{
    srv_prefix_node *x = sti_alloc(1, sizeof *x);
    int32_t *copy = sti_alloc((size_t)n, sizeof *copy);
    if (!x || !copy) {
        free(x);
        free(copy);
        return NULL;
    }
    if (n > 0) memcpy(copy, id, (size_t)n * sizeof *copy);
    *x = (srv_prefix_node){.parent = parent, .id = copy, .n = n, .length = n};
    if (parent) {
        x->length += parent->length;
        x->next = parent->child;
        parent->child = x;
    }
    t->bytes += node_bytes(x);
    return x;
}

static srv_prefix_node *child_of(const srv_prefix_node *x, int32_t first)
{
    srv_prefix_node *c = x->child;
    while (c && c->id[0] != first) c = c->next;
    return c;
}

static srv_prefix_node **link_to(srv_prefix_node *x)
{
    srv_prefix_node **at = &x->parent->child;
    while (*at != x) at = &(*at)->next;
    return at;
}

/* Takes a node without past and children out. */
static void drop_node(srv_prefix_tree *t, srv_prefix_node *x)
{
    t->bytes -= node_bytes(x);
    *link_to(x) = x->next;
    free(x->id);
    free(x);
}

/* A node without a past and with one child: the child's edge begins where its own did.
 * Without memory for that it stays. */
static void join(srv_prefix_tree *t, srv_prefix_node *x)
{
    srv_prefix_node *c = x->child;
    int32_t *both = sti_alloc((size_t)x->n + (size_t)c->n, sizeof *both);
    if (!both) return;
    memcpy(both, x->id, (size_t)x->n * sizeof *both);
    memcpy(both + x->n, c->id, (size_t)c->n * sizeof *both);
    t->bytes -= node_bytes(x) + node_bytes(c);
    free(c->id);
    c->id = both;
    c->n += x->n;
    c->parent = x->parent;
    srv_prefix_node **at = link_to(x);
    c->next = x->next;
    *at = c;
    t->bytes += node_bytes(c);
    free(x->id);
    free(x);
}

/* Takes nodes out that hold nothing any more, from x upwards. */
static void tidy(srv_prefix_tree *t, srv_prefix_node *x)
{
    while (x && x->parent && !x->past) {
        srv_prefix_node *parent = x->parent;
        if (x->child && x->child->next) return;
        if (x->child) {
            join(t, x);
            return;
        }
        drop_node(t, x);
        x = parent;
    }
}

/* The snapshot is the caller's; the node stays. */
static still_snapshot *detach(srv_prefix_tree *t, srv_prefix_node *x)
{
    still_snapshot *past = x->past;
    unlink_use(t, x);
    t->bytes -= still_snapshot_bytes(past);
    t->pasts--;
    x->past = NULL;
    return past;
}

static still_snapshot *take_past(srv_prefix_tree *t, srv_prefix_node *x)
{
    still_snapshot *past = detach(t, x);
    tidy(t, x);
    return past;
}

/* ---- Looking up ---------------------------------------------------------- */

/* Goes down along a text. Returns the last node that it begins with; *in is the child whose
 * edge it leaves, or NULL, *shared the tokens down to there. */
static srv_prefix_node *walk(srv_prefix_node *root, const int32_t *id, int n,
                             srv_prefix_node **in, int *shared)
{
    srv_prefix_node *x = root;
    *in = NULL;
    for (;;) {
        *shared = x->length;
        srv_prefix_node *c = x->length < n ? child_of(x, id[x->length]) : NULL;
        if (!c) return x;
        int same = 0;
        while (same < c->n && x->length + same < n &&
               c->id[same] == id[x->length + same])
            same++;
        if (same < c->n) {
            *in = c;
            *shared = x->length + same;
            return x;
        }
        x = c;
    }
}

/* Some node with a past in what is below x, or x. */
static srv_prefix_node *some_past(srv_prefix_node *x)
{
    while (!x->past) x = x->child;
    return x;
}

/* Whether a text of n tokens, which begins with x's, can go on from its past. */
static bool serves(const srv_prefix_node *x, int n)
{
    return x->past && (x->length < n || x->has_logits);
}

srv_prefix_match srv_prefix_tree_find(srv_prefix_tree *t, const int32_t *id, int n)
{
    srv_prefix_match m = {0};
    srv_prefix_node *in, *x;
    if (!t->root) return m;
    srv_prefix_node *at = walk(t->root, id, n, &in, &m.shared);
    for (x = at; !serves(x, n) && x->parent;) x = x->parent;
    if (!serves(x, n)) x = NULL;
    m.length = x ? x->length : 0;
    /* Of a longer past only the beginning is used, and the last token is fed again. */
    if (t->cuts && (in || at->child || at->past)) {
        const int most = m.shared < n ? m.shared : n - 1;
        if (most > m.length) {
            x = some_past(in ? in : at);
            m.length = most;
        }
    }
    if (!x) return m;
    use(t, x);
    m.past = x->past;
    return m;
}

/* ---- Putting ------------------------------------------------------------- */

/* Cuts the edge of c after n tokens; the node between, NULL without memory. */
static srv_prefix_node *split(srv_prefix_tree *t, srv_prefix_node *c, int n)
{
    int32_t *rest = sti_alloc((size_t)(c->n - n), sizeof *rest);
    if (!rest) return NULL;
    srv_prefix_node *parent = c->parent;
    srv_prefix_node *x =
        new_node(t, parent, c->id, n); /* now its parent's first child */
    if (!x) {
        free(rest);
        return NULL;
    }
    memcpy(rest, c->id + n, (size_t)(c->n - n) * sizeof *rest);
    t->bytes -= node_bytes(c);
    *link_to(c) = c->next;
    free(c->id);
    c->id = rest;
    c->n -= n;
    c->parent = x;
    c->next = NULL;
    x->child = c;
    t->bytes += node_bytes(c);
    return x;
}

/* The node of a text, made if need be. */
static srv_prefix_node *place(srv_prefix_tree *t, const int32_t *id, int n)
{
    srv_prefix_node *in;
    int shared;
    if (!t->root) t->root = new_node(t, NULL, NULL, 0);
    if (!t->root) return NULL;
    srv_prefix_node *x = walk(t->root, id, n, &in, &shared);
    if (in) x = split(t, in, shared - x->length);
    if (x && shared < n) {
        srv_prefix_node *leaf = new_node(t, x, id + shared, n - shared);
        if (!leaf) tidy(t, x);
        x = leaf;
    }
    return x;
}

/* What the past of x continues: it is needed again only if a text parts there, and not at
 * all if the longer one can be cut. */
static void demote_above(srv_prefix_tree *t, srv_prefix_node *x)
{
    for (srv_prefix_node *a = x->parent, *up; a; a = up) {
        up = a->parent;
        if (!a->past || (!t->cuts && a->child->next)) continue;
        if (t->cuts) {
            still_snapshot_free(take_past(t, a));
        } else {
            unlink_use(t, a);
            link_oldest(t, a);
            a->continued = true;
        }
    }
}

/* Takes the past of x out, to the disk if there is one and it is worth that. Returns it
 * otherwise. */
static still_snapshot *give_up(srv_prefix_tree *t, srv_prefix_node *x, bool wait)
{
    if (!t->disk || x->continued) return take_past(t, x);
    const int n = x->length;
    const bool has_logits = x->has_logits;
    for (const srv_prefix_node *a = x; a->parent; a = a->parent)
        memcpy(t->path + a->length - a->n, a->id, (size_t)a->n * sizeof *a->id);
    srv_prefix_disk_put(t->disk, t->path, n, has_logits, take_past(t, x), wait);
    return NULL;
}

/* Gives up the oldest pasts until `need` more bytes fit. Returns one of their snapshots,
 * whose memory can be used again, or NULL. */
static still_snapshot *make_room(srv_prefix_tree *t, size_t need)
{
    still_snapshot *again = NULL;
    while (t->oldest && (t->limit < need || t->bytes > t->limit - need)) {
        still_snapshot_free(again);
        again = give_up(t, t->oldest, false);
        t->given_up++;
    }
    return again;
}

void srv_prefix_tree_put(srv_prefix_tree *t, const int32_t *id, const still_session *s)
{
    const int n = still_session_length(s);
    const size_t key = (size_t)n * sizeof *id + 2 * sizeof(srv_prefix_node);
    const size_t need = still_session_snapshot_bytes(s) + key;
    if (n < 1 || need > t->limit) return;
    srv_prefix_match m = srv_prefix_tree_find(t, id, n);
    if (m.past && (m.length == n || (t->cuts && m.shared == n)))
        return; /* it is there, and the newest */
    still_snapshot *past = make_room(t, need);
    if (still_session_snapshot_again(s, &past, NULL) != STILL_OK) return;
    srv_prefix_node *x = place(t, id, n);
    if (!x) {
        still_snapshot_free(past);
        return;
    }
    if (x->past) still_snapshot_free(detach(t, x));
    x->past = past;
    x->has_logits = still_session_logits(s) != NULL;
    t->bytes += still_snapshot_bytes(past);
    t->pasts++;
    link_newest(t, x);
    demote_above(t, x);
}

void srv_prefix_tree_free(srv_prefix_tree *t)
{
    while (t->oldest) still_snapshot_free(give_up(t, t->oldest, true));
    if (t->root) {
        free(t->root->id);
        free(t->root);
    }
    free(t->path);
    *t = (srv_prefix_tree){0};
}
