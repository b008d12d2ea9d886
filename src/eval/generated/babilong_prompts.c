/* babilong_prompts.c - what BABILong says in front of a context and behind it. */
#include "eval/generated/babilong_prompts.h"

#include <string.h>

#include "base/utf8.h"
#include "eval/generated/sentences.h"
#include "eval/text.h"

#define GIVE "I will give you context with the facts about "
#define HIDDEN "hidden in some random text and a question."
#define FACTS                                                                          \
    "You need to answer the question based only on the information from the facts."
#define MOVES                                                                          \
    "If a person got an item in the first location and travelled to the second "       \
    "location the item is also in the second location. If a person dropped an item "   \
    "in "                                                                              \
    "the first location and moved to the second location the item remains in the "     \
    "first location."
#define FORMAT "Always return your answer in the following format: "
#define STOP " Do not write anything else after that."
#define EXAMPLE(text, answer) "<example>\n" text "\nAnswer: " answer "\n</example>"
#define ACTIONS                                                                        \
    "I give you context with the facts about locations and actions of different "      \
    "persons " HIDDEN

/* clang-format off */
const sti_babilong_task sti_babilong_tasks[STI_BABILONG_TASKS] = { /* a line or more for each part */
    {"qa1",
     GIVE "positions of different persons " HIDDEN " " FACTS
     " If a person was in different locations, use the latest location to answer the "
     "question.\n\n"
     EXAMPLE("Charlie went to the hallway. Judith come back to the kitchen. Charlie "
             "travelled to balcony. Where is Charlie?",
             "The most recent location of Charlie is balcony.")
     "\n\n"
     EXAMPLE("Alan moved to the garage. Charlie went to the beach. Alan went to the "
             "shop. Rouse travelled to balcony. Where is Alan?",
             "The most recent location of Alan is shop.")
     "\n\n"
     FORMAT "The most recent location of ’person’ is ’location’." STOP},
    {"qa2",
     ACTIONS FACTS "\n" MOVES "\n\n" /* no space between the two */
     EXAMPLE("Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the "
             "balcony. Where is the bottle?",
             "The bottle is in the balcony.")
     "\n"
     EXAMPLE("Alan moved to the garage. Alan got a screw driver. Alan moved to the "
             "kitchen. Where is the screw driver?",
             "The screw driver is in the kitchen.")
     "\n\n"
     FORMAT "The ’item’ is in ’location’." STOP},
    {"qa3",
     ACTIONS " " FACTS "\n" MOVES "\n\n"
     EXAMPLE("John journeyed to the bedroom. Mary grabbed the apple. Mary went back to "
             "the bathroom. Daniel journeyed to the bedroom. Daniel moved to the garden. "
             "Mary travelled to the kitchen. Where was the apple before the kitchen?",
             "Before the kitchen the apple was in the bathroom.")
     "\n"
     EXAMPLE("John went back to the bedroom. John went back to the garden. John went "
             "back to the kitchen. Sandra took the football. Sandra travelled to the "
             "garden. Sandra journeyed to the bedroom. Where was the football before "
             "the bedroom?",
             "Before the bedroom the football was in the garden.")
     "\n\n"
     FORMAT "Before the $location_1$ the $item$ was in the $location_2$." STOP},
    {"qa4",
     GIVE "different people, their location and actions, " HIDDEN " " FACTS "\n\n"
     EXAMPLE("The hallway is south of the kitchen. The bedroom is north of the kitchen. "
             "What is the kitchen south of?",
             "bedroom")
     "\n"
     EXAMPLE("The garden is west of the bedroom. The bedroom is west of the kitchen. "
             "What is west of the bedroom?",
             "garden")
     "\n\n"
     "Your answer should contain only one word - location." STOP},
    {"qa5",
     GIVE "locations and their relations " HIDDEN " " FACTS "\n\n"
     EXAMPLE("Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to "
             "the bedroom. Bill took the milk there. Who did Mary give the apple to?",
             "Fred")
     "\n"
     EXAMPLE("Jeff took the football there. Jeff passed the football to Fred. Jeff got "
             "the milk there. Bill travelled to the bedroom. Who gave the football?",
             "Jeff")
     "\n"
     EXAMPLE("Fred picked up the apple there. Fred handed the apple to Bill. Bill "
             "journeyed to the bedroom. Jeff went back to the garden. What did Fred give "
             "to Bill?",
             "apple")
     "\n\n"
     "Your answer should contain only one word." STOP " Do not explain your answer."},
};
/* clang-format on */

static void put_stripped(sti_buf *b, const char *s, size_t n)
{
    while (n && sti_white(s, n)) {
        const size_t k = sti_white(s, n);
        s += k;
        n -= k;
    }
    sti_buf_put(b, s, sti_text_strip_end(s, n));
}

void sti_babilong_prompt(sti_buf *out, const sti_babilong_task *t,
                         const sti_buf *context, const char *question)
{
    sti_buf_puts(out, t->head);
    sti_buf_puts(out, "\n\n<context>\n");
    put_stripped(out, context->p, context->n);
    sti_buf_puts(out, "\n</context>\n\nQuestion: ");
    sti_buf_put(out, question, sti_text_strip_end(question, strlen(question)));
}
