/* prefix_tree.h - pasts that were set aside, by their tokens.
 *
 * A radix tree: an edge holds tokens, a node the past after all tokens down to it, or none.
 * Pasts are snapshots, exact at any length, so whoever comes with a text that begins with
 * their tokens goes on from there. They are given up in the order of their last use when
 * they take more than a number of bytes. */
#ifndef SERVER_PREFIX_TREE_H
#define SERVER_PREFIX_TREE_H

#include "server/prefix_disk.h"

typedef struct srv_prefix_node srv_prefix_node;

typedef struct srv_prefix_tree {
    srv_prefix_node *root;            /* NULL: nothing was put yet */
    srv_prefix_node *newest, *oldest; /* nodes with a past, by use */
    size_t bytes, limit;
    int pasts;
    bool cuts; /* a past can be cut to any length: every key is kept */
    uint64_t given_up;
    srv_prefix_disk *disk; /* where pasts go that are given up; NULL: nowhere */
    int32_t *path; /* room for the tokens of such a past, as many as there can be */
} srv_prefix_tree;

/* Frees all it holds; with a disk, pasts go there that no other continues. The disk is not
 * closed. */
void srv_prefix_tree_free(srv_prefix_tree *t);

/* How much of a text is there. */
typedef struct srv_prefix_match {
    const still_snapshot *past; /* NULL: none helps; valid until the next put */
    int length; /* tokens of the text that it gives, after a cut if it has
                                   more; less than n unless it has logits and no more */
    int shared; /* leading tokens that some text of the tree has, too */
} srv_prefix_match;
/* The longest past that the n tokens begin with; it is then the newest. */
srv_prefix_match srv_prefix_tree_find(srv_prefix_tree *t, const int32_t *id, int n);

/* Puts the past of a session, whose tokens are id[0..n), into the tree. Pasts that it
 * continues are the next to go, but where texts part. Does nothing if it takes more than
 * the limit, or if there is no memory. */
void srv_prefix_tree_put(srv_prefix_tree *t, const int32_t *id, const still_session *s);

#endif
