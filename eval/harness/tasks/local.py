"""What the task files cannot say in Jinja."""
import functools
import re


def _clean(text):
    """WikiHow's marks out of a HellaSwag text: a title begins a sentence, others go."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag(docs):
    def prepare(doc):
        start = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
        return {"query": _clean(start), "choices": [_clean(e) for e in doc["endings"]]}

    return docs.map(prepare)


def winogrande_gold(doc):
    return int(doc["answer"]) - 1


def winogrande_contexts(doc):
    before = doc["sentence"].partition("_")[0]
    return [before + doc["option1"], before + doc["option2"]]


def winogrande_rest(doc):
    return doc["sentence"].partition("_")[2].strip()


def _of_subject(subject, docs):
    return docs.filter(lambda doc: doc["subject"] == subject)


def __getattr__(name):
    """mmlu_SUBJECT: the questions of a subject, for the files that `run` writes."""
    if not name.startswith("mmlu_"):
        raise AttributeError(name)
    return functools.partial(_of_subject, name.removeprefix("mmlu_"))
