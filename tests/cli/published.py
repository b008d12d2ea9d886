#!/usr/bin/env python3
"""Data sets in the forms in which they are published, small, and what still makes of them.

    published.py OUT URL [DATA]

Writes OUT/files (the published files), OUT/made (what `still pull-data` must make of them,
byte for byte) and OUT/sources.json, a list of sources whose addresses begin with URL. The
records are invented here, or those of DATA, a folder of files that still reads, which are
put back into the published forms.
"""
import csv
import gzip
import hashlib
import io
import json
import pathlib
import random
import sys
import tarfile
import zipfile

TRICKY = ['a "quoted" word, a comma', "two\nlines", "Überall – 東京 😀", " spaces ", "tab\there"]

OWN = {
    "piqa_valid.jsonl": [
        {"goal": TRICKY[0], "sol1": "stir it", "sol2": TRICKY[2], "label": 1},
        {"goal": "keep soup warm", "sol1": "a flask", "sol2": "a bag", "label": 0}],
    "arc_easy_test.jsonl": [
        {"id": "A_1", "question": TRICKY[0], "choices": ["hot", "cold", TRICKY[2]], "answer": 2},
        {"id": "A_2", "question": "Which?", "choices": list("abcde"), "answer": 0}],
    "arc_challenge_test.jsonl": [
        {"id": "C_1", "question": "Why?", "choices": ["so", "not"], "answer": 1}],
    "hellaswag_valid.jsonl": [
        {"ind": 24, "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he",
         "ctx": "A man sits. he", "endings": ["falls.", TRICKY[2], "[step] Sings.", "eats."],
         "source_id": "activitynet~v_1", "split_type": "indomain", "label": 3}],
    "winogrande_xl_valid.jsonl": [
        {"sentence": "Ann beat Eve as _ was good.", "option1": "Ann", "option2": "Eve",
         "answer": 1},
        {"sentence": "The _ is hot.", "option1": TRICKY[2], "option2": "ice", "answer": 2}],
    "mmlu_test.jsonl": [
        {"subject": "anatomy", "question": TRICKY[0], "choices": TRICKY[:4], "answer": 3},
        {"subject": "anatomy", "question": 'Only "one"', "choices": ["", "1", "2", "3"],
         "answer": 0},
        {"subject": "virology", "question": TRICKY[1], "choices": list("abcd"), "answer": 2}],
    "mmlu_dev.jsonl": [
        {"subject": s, "question": f"Shot {i} of {s}?", "choices": list("abcd"), "answer": i % 4}
        for s in ("anatomy", "virology") for i in range(5)],
    "mmlu_valid.jsonl": [
        {"subject": "anatomy", "question": "Valid?", "choices": list("abcd"), "answer": 1}],
    "lambada_openai_test.jsonl": [
        {"context": "She took the “stone”\n\nand gave the", "target": "stone"},
        {"context": "a b", "target": "c"}],
    "wikitext2_raw_test.jsonl": [
        {"title": "Du Fu", "text": " = Du Fu = \n \n Du Fu ( 712 – 770 ) was a poet . \n"
         " = = Life = = \n \n He lived . \n = 1 @.@ 2 = \n It is a line . \n \n"},
        {"title": "Tower = 2", "text": " = Tower = 2 = \n \n A tower . \n \n \n"}],
    "wikitext2_raw_valid.jsonl": [
        {"title": "Homarus", "text": " = Homarus = \n \n A lobster . \n"}],
    "wikitext2_raw_train.jsonl": [
        {"title": f"Item {i}", "text": f" = Item {i} = \n \n Text number {i} . \n \n"}
        for i in range(3)],
    "squad_v2_dev.jsonl": [
        {"title": "Normans", "context": TRICKY[2], "qas": [
            {"id": "5a", "question": "Who?", "answers": ["Rollo", "Rollo", TRICKY[0]]},
            {"id": "5b", "question": "Who not?", "answers": []}]},
        {"title": "Normans", "context": "Second.", "qas": []},
        {"title": "Tea", "context": "Third.", "qas": [
            {"id": "5c", "question": "What?", "answers": ["tea"]}]}],
    "hotpotqa_dev_distractor.jsonl": [
        {"id": "5ab", "question": TRICKY[0], "answer": "yes", "type": "comparison",
         "level": "hard", "supporting_facts": [["Scott", 0], ["Ed", 0]],
         "context": [{"title": "Scott", "sentences": ["One.", " Two – " + TRICKY[2]]},
                     {"title": "Ed", "sentences": ["Ed."]}]}],
    "babi_qa1_qa5_test.jsonl": [
        {"task": f"qa{t}", "story": s, "facts": facts, "question": question,
         "answer": answer, "supporting": supporting}
        for t in range(1, 6) for s in range(2) for facts, question, answer, supporting in [
            (["Mary moved to the bathroom.", "John went home."], "Where is Mary?",
             "bathroom", [0]),
            (["Mary moved to the bathroom.", "John went home.", "Mary left."],
             "Where is Mary?", "nowhere", [2, 0])]],
    "paul_graham_essays.jsonl": [
        {"name": "addiction", "text": "July 2010What is\nit?  " + TRICKY[2] + "\n"},
        {"name": "worked", "text": "Before college."}],
    "gutenberg_books.jsonl": [
        {"title": "Emma", "author": "Jane Austen", "source": "Project Gutenberg 158",
         "text": "    EMMA\n\nBy Jane Austen\n\n\nChapter 1\n\nEmma, “handsome”, was rich.\n"},
        {"title": "Folk Lore", "author": "", "source": "Project Gutenberg 20",
         "text": "FOLK LORE\n\nThe end.\n"}],
    "alpaca_original.jsonl": [
        {"instruction": "Give three tips.", "input": "", "output": "1.Eat.\n2. Sleep."},
        {"instruction": TRICKY[0], "input": TRICKY[2], "output": ""}],
    "alpaca_cleaned.jsonl": [
        {"instruction": "Sum.", "input": "1 2", "output": "3"}],
    "words_adjectives.txt": ["quick", "blue-eyed"],
    "words_nouns.txt": ["ATM", "stone"],
    "words_verbs.txt": ["add", "abide"],
    "words_english.txt": ["A", "aardvark", "zythum"],
}
BOOKS = {"158": ("Produced by An Anonymous Volunteer\n\n\n\n\n",
                 "\n\n\nEnd of the Project Gutenberg EBook of Emma, by Jane Austen\n\n"),
         "20": ("\n\n", "\n\n")}


def lines(records):
    text = "".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n"
                   for r in records)
    return text.encode()


def zipped(files, method=zipfile.ZIP_DEFLATED):
    """An archive as macOS makes them: what it adds has the names of what it is about."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        for name, data in files.items():
            z.writestr(name, data)
            folder, _, base = name.rpartition("/")
            z.writestr(f"__MACOSX/{folder}/._{base}", b"Mac OS X")
    return out.getvalue()


def tarred(files, mode="w", form=tarfile.GNU_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as t:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()


def piqa(of):
    records = of["piqa_valid.jsonl"]
    questions = [{k: r[k] for k in ("goal", "sol1", "sol2")} for r in records]
    labels = "".join(f"{r['label']}\n" for r in records)
    return {"physicaliqa-train-dev.zip": zipped({
        "physicaliqa-train-dev/dev.jsonl": lines(questions),
        "physicaliqa-train-dev/dev-labels.lst": labels.encode(),
        "physicaliqa-train-dev/train.jsonl": b"{}\n"})}


def arc(of):
    rng = random.Random(5)  # the archive is much larger than the questions
    files = {"ARC-V1-Feb2018-2/ARC_Corpus.txt": rng.randbytes(900_000)}
    for name in ("Easy", "Challenge"):
        records = []
        for i, r in enumerate(of[f"arc_{name.lower()}_test.jsonl"]):
            labels = "12345" if i % 2 else "ABCDE"
            records.append({"id": r["id"], "question": {
                "stem": r["question"], "choices": [
                    {"text": c, "label": labels[k]} for k, c in enumerate(r["choices"])]},
                "answerKey": labels[r["answer"]]})
        files[f"ARC-V1-Feb2018-2/ARC-{name}/ARC-{name}-Test.jsonl"] = \
            json.dumps(records[0]).encode() + b"\n" + lines(records[1:])
    files["ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.csv"] = rng.randbytes(900_000)
    return {"ARC-V1-Feb2018.zip": zipped(files)}


def parts_of(name, raw):
    """What of an archive is enough, with checksums."""
    if not name.startswith("ARC"):
        return {}
    with zipfile.ZipFile(io.BytesIO(raw)) as z:
        return {"parts": {n.rpartition("/")[2]: hashlib.sha256(z.read(n)).hexdigest()
                          for n in z.namelist() if n.endswith("-Test.jsonl") and "._" not in n}}


def hellaswag(of):
    order = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "split_type", "label",
             "endings", "source_id")
    records = [dict([("split", "val")] + [(k, r[k]) for k in order])
               for r in of["hellaswag_valid.jsonl"]]
    return {"hellaswag_val.jsonl": "".join(json.dumps(r) + "\n" for r in records).encode()}


def winogrande(of):
    records = [{"qID": f"Q{i}", **{k: r[k] for k in ("sentence", "option1", "option2")},
                "answer": str(r["answer"])}
               for i, r in enumerate(of["winogrande_xl_valid.jsonl"])]
    return {"winogrande_1.1.zip": zipped({"winogrande_1.1/dev.jsonl": lines(records),
                                          "winogrande_1.1/test.jsonl": b"{}\n"},
                                         zipfile.ZIP_STORED)}


def mmlu(of):
    files = {"data/README.txt": b"read me", "data/auxiliary_train/race.csv": b"x" * 200_000}
    for part, name in (("val", "valid"), ("test", "test"), ("dev", "dev")):
        by_subject = {}
        for r in of[f"mmlu_{name}.jsonl"]:
            by_subject.setdefault(r["subject"], []).append(r)
        for subject in sorted(by_subject, reverse=True):  # an archive has any order
            out = io.StringIO()
            writer = csv.writer(out, lineterminator="\r\n" if part == "test" else "\n")
            for r in by_subject[subject]:
                writer.writerow([r["question"], *r["choices"], "ABCD"[r["answer"]]])
            files[f"data/{part}/{subject}_{part}.csv"] = out.getvalue().encode()
            files[f"data/{part}/._{subject}_{part}.csv"] = b"Mac OS X"
    return {"data.tar": tarred(files)}


def lambada(of):
    return {"lambada_test.jsonl": "".join(
        json.dumps({"text": r["context"] + " " + r["target"]}) + "\n"
        for r in of["lambada_openai_test.jsonl"]).encode()}


def wikitext2(of):
    return {"wikitext-2-raw-v1.zip": zipped({
        f"wikitext-2-raw/wiki.{part}.raw":
        (" \n" + "".join(r["text"] for r in of[f"wikitext2_raw_{part}.jsonl"])).encode()
        for part in ("test", "valid", "train")})}


def squad(of):
    articles = []
    for r in of["squad_v2_dev.jsonl"]:
        if not articles or articles[-1]["title"] != r["title"]:
            articles.append({"title": r["title"], "paragraphs": []})
        articles[-1]["paragraphs"].append({"qas": [
            {"question": q["question"], "id": q["id"],
             "answers": [{"text": a, "answer_start": 0} for a in q["answers"]],
             "is_impossible": not q["answers"]} for q in r["qas"]], "context": r["context"]})
    return {"dev-v2.0.json": json.dumps({"version": "v2.0", "data": articles}).encode()}


def hotpotqa(of):
    return {"hotpot_dev_distractor_v1.json": json.dumps([
        {"_id": r["id"], "answer": r["answer"], "question": r["question"],
         "supporting_facts": r["supporting_facts"],
         "context": [[c["title"], c["sentences"]] for c in r["context"]],
         "type": r["type"], "level": r["level"]}
        for r in of["hotpotqa_dev_distractor.jsonl"]]).encode()}


def babi_text(records):
    """The lines of one task: each fact once, questions where they are asked."""
    text, story, number = "", None, []
    for r in records:
        if r["story"] != story:
            story, number, at = r["story"], [], 0
        for fact in r["facts"][len(number):]:
            at += 1
            number.append(at)
            text += f"{at} {fact}\n"
        at += 1
        supporting = " ".join(str(number[i]) for i in r["supporting"])
        text += f"{at} {r['question']} \t{r['answer']}\t{supporting}\n"
    return text.encode()


def babi(of):
    records = of["babi_qa1_qa5_test.jsonl"]
    files = {"tasks_1-20_v1-2/LICENSE.txt": b"CC BY 3.0"}
    for t in range(5, 0, -1):
        for folder in ("en", "en-10k", "shuffled-10k"):
            mine = [r for r in records if r["task"] == f"qa{t}"]
            files[f"tasks_1-20_v1-2/{folder}/qa{t}_some-facts_test.txt"] = \
                babi_text(mine if folder == "en-10k" else mine[:1])
        files[f"tasks_1-20_v1-2/en-10k/qa{t}_some-facts_train.txt"] = b"1 No.\n"
    files["tasks_1-20_v1-2/en-10k/qa15_some-facts_test.txt"] = b"1 No.\n"
    return {"tasks_1-20_v1-2.tar.gz": tarred(files, "w:gz", tarfile.USTAR_FORMAT)}


def essays(of):
    return {r["name"] + ".txt": r["text"].encode() for r in of["paul_graham_essays.jsonl"]}


def books(of):
    files = {}
    for i, r in enumerate(of["gutenberg_books.jsonl"]):
        number = r["source"].split()[-1]
        before, after = BOOKS.get(number, ("\n\n", "\n\n"))
        author = f"Author: {r['author']}\n" if r["author"] else ""
        text = (f"\ufeffThe Project Gutenberg eBook of {r['title']}\n\nTitle: {r['title']}\n\n"
                f"{author}\n*** START OF THE PROJECT GUTENBERG EBOOK {r['title'].upper()} ***\n"
                f"{before}{r['text']}{after}"
                f"*** END OF THE PROJECT GUTENBERG EBOOK {r['title'].upper()} ***\n\nLicence\n")
        files[f"pg{number}.txt"] = text.replace("\n", "\n" if i % 2 else "\r\n").encode()
    return files


def alpaca(of, made="alpaca_original.jsonl", name="alpaca_data.json"):
    keys = ("instruction", "input", "output")
    return {name: json.dumps([{k: r[k] for k in keys} for r in of[made]], indent=4).encode()}


def cleaned(of):
    return alpaca(of, "alpaca_cleaned.jsonl", "alpaca_data_cleaned.json")


def words(of):
    return {"wonderwords-3.0.1-py3-none-any.whl": zipped({
        f"wonderwords/assets/{kind}list.txt":
        " \n".join(of[f"words_{kind}s.txt"]).encode() for kind in ("adjective", "noun", "verb")}),
            "words.zip": zipped({"words/en": "\n".join(of["words_english.txt"]).encode(),
                                 "words/en-basic": b"basic\n"})}


SETS = {  # which files they make, how they are published, whether they have checksums
    "piqa": (["piqa_valid.jsonl"], piqa, True),
    "arc": (["arc_easy_test.jsonl", "arc_challenge_test.jsonl"], arc, True),
    "hellaswag": (["hellaswag_valid.jsonl"], hellaswag, True),
    "winogrande": (["winogrande_xl_valid.jsonl"], winogrande, True),
    "mmlu": ([f"mmlu_{p}.jsonl" for p in ("test", "dev", "valid")], mmlu, True),
    "lambada": (["lambada_openai_test.jsonl"], lambada, True),
    "wikitext2": ([f"wikitext2_raw_{p}.jsonl" for p in ("test", "valid", "train")],
                  wikitext2, True),
    "squad": (["squad_v2_dev.jsonl"], squad, True),
    "hotpotqa": (["hotpotqa_dev_distractor.jsonl"], hotpotqa, True),
    "essays": (["paul_graham_essays.jsonl"], essays, False),
    "babi": (["babi_qa1_qa5_test.jsonl"], babi, True),
    "books": (["gutenberg_books.jsonl"], books, False),
    "alpaca": (["alpaca_original.jsonl"], alpaca, False),
    "alpaca-cleaned": (["alpaca_cleaned.jsonl"], cleaned, False),
    "words": ([f"words_{k}.txt" for k in ("adjectives", "nouns", "verbs", "english")],
              words, True),
}


def read(data, name):
    """A file's records, without the index; None: it is not there."""
    for path in (data / name, data / (name + ".gz")):
        if path.exists():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else \
                path.read_bytes()
            if name.endswith(".txt"):
                return raw.decode().splitlines()
            # str.splitlines would also break lines inside of texts
            records = [json.loads(line) for line in raw.decode().split("\n") if line]
            return [{k: v for k, v in r.items() if k != "index"} for r in records]
    return None


def main():
    out, url = pathlib.Path(sys.argv[1]), sys.argv[2]
    data = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    of = {name: read(data, name) if data else records for name, records in OWN.items()}
    if data and of["gutenberg_books.jsonl"]:
        for i, r in enumerate(of["gutenberg_books.jsonl"]):
            r["source"] = f"Project Gutenberg {i + 1}"
    (out / "files").mkdir(parents=True, exist_ok=True)
    (out / "made").mkdir(exist_ok=True)
    sets = []
    for name, (makes, publish, summed) in SETS.items():
        for m in makes:
            if of[m] is None:  # a part that DATA has not: an own one in its place
                of[m] = OWN[m]
                print(f"{m}: invented", file=sys.stderr)
        files = publish(of)
        entries = []
        for file, raw in files.items():
            (out / "files" / file).write_bytes(raw)
            entries.append({"name": file, "url": [f"{url}/{file}"], **(
                {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} if summed
                else {"most": 100_000_000}), **parts_of(file, raw)})
        sets.append({"name": name, "title": name, "home": "https://example.org",
                     "licence": "none", "convert": name, "files": entries})
        for m in makes:
            made = "".join(w + "\n" for w in of[m]).encode() if m.endswith(".txt") else \
                lines({"index": i, **r} for i, r in enumerate(of[m]))
            (out / "made" / m).write_bytes(made)
    (out / "sources.json").write_text(json.dumps({"version": 1, "sets": sets}, indent=1))


if __name__ == "__main__":
    main()
