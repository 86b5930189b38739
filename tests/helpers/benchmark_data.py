# SPDX-License-Identifier: Apache-2.0
"""Made-up data in the schemas of the real data sets, in a folder as `--data-root` takes it, and who can answer it."""

import json

import datasets
from lm_eval.api.model import LM


LETTERS = "ABCDEFGHIJ"


def choice(i, n=4):
    """A question with n options, and which is right."""
    return f"Which of these is item number {i}?", [f"item {i + k}" for k in range(n)], (i * 7) % n


def mmlu(i):
    question, options, answer = choice(i)
    return {"question": question, "choices": options, "answer": answer, "subject": "s"}


def mmlu_pro(i, category):
    question, options, answer = choice(i, 10)
    return {
        "question_id": i,
        "question": question,
        "options": options,
        "answer": LETTERS[answer],
        "answer_index": answer,
        "cot_content": f"A: Let's think step by step. The answer is ({LETTERS[answer]}).",
        "category": category,
        "src": "made up",
    }


def gpqa(i):
    question, options, _ = choice(i)
    wrong = {f"Incorrect Answer {k}": options[k] for k in (1, 2, 3)}
    return {"Question": question, "Correct Answer": options[0], **wrong}


def arc(i):
    question, options, answer = choice(i)
    choices = {"text": options, "label": list("ABCD")}
    return {"id": str(i), "question": question, "choices": choices, "answerKey": "ABCD"[answer]}


def hellaswag(i):
    _, options, answer = choice(i)
    return {
        "ind": i,
        "activity_label": "Counting",
        "ctx_a": f"A man counts to {i}.",
        "ctx_b": "then he",
        "ctx": f"A man counts to {i}. then he",
        "endings": [f"says {option}." for option in options],
        "source_id": str(i),
        "split": "val",
        "split_type": "indomain",
        "label": str(answer),
    }


def four_options(i, question_field="question", answer_field="answer"):
    question, options, answer = choice(i)
    return {question_field: question, **dict(zip("ABCD", options)), answer_field: "ABCD"[answer]}


SCHEMAS = {
    "cais/mmlu": lambda i, config: mmlu(i),
    "TIGER-Lab/MMLU-Pro": None,  # one config with all categories, see `rows`
    "Idavidrein/gpqa": lambda i, config: gpqa(i),
    "SaylorTwift/bbh": lambda i, config: {"input": f"What is {i} + 1?", "target": str(i + 1)},
    "allenai/ai2_arc": lambda i, config: arc(i),
    "Rowan/hellaswag": lambda i, config: hellaswag(i),
    "mandarjoshi/trivia_qa": lambda i, config: {
        "question": f"What comes after {i}",
        "question_id": str(i),
        "answer": {"aliases": [f"number {i + 1}"], "value": f"number {i + 1}"},
    },
    "openai/gsm8k": lambda i, config: {"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"},
    "juletxara/mgsm": lambda i, config: {
        "question": f"What is {i} + 10?",
        "answer": None,
        "answer_number": i + 10,
        "equation_solution": None,
    },
    "EleutherAI/hendrycks_math": lambda i, config: {
        "problem": f"What is {i} + 1?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"It is $\\boxed{{{i + 1}}}$.",
    },
    "HuggingFaceH4/MATH-500": lambda i, config: {
        "problem": f"What is {i} + 1?",
        "solution": f"It is $\\boxed{{{i + 1}}}$.",
        "answer": str(i + 1),
        "subject": "Algebra",
        "level": 1,
        "unique_id": str(i),
    },
    "weitianwen/cmath": lambda i, config: {"question": f"{i}加一是多少？", "golden": str(i + 1), "grade": 1},
    "openai/openai_humaneval": lambda i, config: {
        "task_id": f"made/{i}",
        "prompt": f'def plus_{i}(x):\n    """Add {i} to x."""\n',
        "canonical_solution": f"    return x + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
        "entry_point": f"plus_{i}",
    },
    "google-research-datasets/mbpp": lambda i, config: {
        "task_id": i,
        "text": f"Write a function that adds {i}.",
        "code": f"def plus(x):\n    return x + {i}",
        "test_list": [f"assert plus({k}) == {i + k}" for k in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "haonan-li/cmmlu": lambda i, config: four_options(i, "Question", "Answer"),
    "ceval/ceval-exam": lambda i, config: {"id": i, **four_options(i), "explanation": ""},
}
CATEGORIES = [
    *("biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law"),
    *("math", "other", "philosophy", "physics", "psychology"),
]


SPLITS = ("train", "dev", "validation", "val", "test")
# Those from which examples for the prompt are taken
POOLS = ("train", "dev", "validation")


def rows(path, config, split, count):
    offset = 1000 * SPLITS.index(split)
    if path == "TIGER-Lab/MMLU-Pro":
        return [mmlu_pro(offset + i, category) for category in CATEGORIES for i in range(6)]
    return [SCHEMAS[path](offset + i, config) for i in range(30 if split in POOLS else count)]


def tasks_without_data(manager, names, count, monkeypatch):
    """Tasks on made-up data that never touch a file."""

    def load_dataset(path, name=None, **kwargs):
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list(rows(path, name, split, count)) for split in SPLITS}
        )

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", load_dataset)
        return manager.load(names)["tasks"]


def write_data_root(root, tasks, count):
    """Write every data set of the tasks, with the splits they use."""
    wanted = {}
    for task in tasks:
        config = task.config
        splits = {config.training_split, config.validation_split, config.test_split, config.fewshot_split} - {None}
        wanted.setdefault(config.dataset_path, {}).setdefault(config.dataset_name or "default", set()).update(splits)
    for path, configs in wanted.items():
        folder = root / path
        folder.mkdir(parents=True)
        described = []
        for config, splits in configs.items():
            files = []
            for split in sorted(splits):
                name = f"{config}-{split}.parquet"
                datasets.Dataset.from_list(rows(path, config, split, count)).to_parquet(folder / name)
                files.append({"split": split, "path": name})
            described.append({"config_name": config, "data_files": files})
        (folder / "README.md").write_text("---\n" + json.dumps({"configs": described}) + "\n---\n")


class Answerer(LM):
    """Knows the right answer to every document, and gives it, or another one where `wrong(task, doc)` says so.

    Its chat template writes every message as `<role>content`, so that prompts show the turns.
    """

    tokenizer_name = "made up"

    def __init__(self, tasks, wrong=lambda task, doc_id: False):
        super().__init__()
        self.tasks, self.wrong = {task.config.task: task for task in tasks}, wrong
        self.asked, self.prompts = [], {}

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        prompt = "".join(f"<{message['role']}>{message['content']}" for message in chat_history)
        return prompt + "<assistant>" * add_generation_prompt

    def chat_template(self, chat_template=False):
        return "made up"

    def loglikelihood(self, requests):
        answers = []
        for request in requests:
            task = self.tasks[request.task_name]
            self.asked.append((request.task_name, request.doc_id))
            target = int(task.doc_to_target(request.doc))
            right = request.idx == target
            answers.append((0.0 if right != self.wrong(request.task_name, request.doc_id) else -50.0, right))
        return answers

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        answers = []
        for request in requests:
            self.asked.append((request.task_name, request.doc_id))
            self.prompts[request.task_name] = request.args[0]
            right = answer_in_words(request.task_name, request.doc)
            answers.append("no idea" if self.wrong(request.task_name, request.doc_id) else right)
        return answers


def answer_in_words(task, doc):
    """What a model would write whose answer is right."""
    if task.startswith("mmlu_llama"):  # the prompt ends with "The best answer is"
        return f" {'ABCD'[doc['answer']]}."
    if task.startswith("mmlu_pro_llama"):
        return f"It is counted. The best answer is {doc['answer']}."
    if task.startswith("arc_challenge_chat"):
        return f" {doc['answerKey']}"
    if task.startswith("gsm8k_cot_llama"):
        return f"It is one more. The final answer is {doc['answer'].split('#### ')[1]}"
    if task == "humaneval_instruct":  # the prompt ends with the head of the function
        return doc["canonical_solution"] + "```\nThis adds."
    if task.startswith("mmlu_pro"):
        return f"The answer is ({doc['answer']})."
    if task.startswith("bbh"):
        return f"So the answer is {doc['target']}."
    if task.startswith("triviaqa"):
        return doc["answer"]["aliases"][0]
    if task.startswith("gsm8k"):
        return f"The answer is {doc['answer'].split('#### ')[1]}."
    if task.startswith("mgsm"):
        return f"The answer is {doc['answer_number']}."
    if task.startswith("minerva"):
        return f"Final Answer: The final answer is ${doc['answer']}$. I hope it is correct."
    if task.startswith("humaneval"):
        return doc["canonical_solution"]
    if task.startswith("mbpp"):
        return doc["code"]
    if task.startswith("attnres_cmath"):
        return f"等于{doc['golden']}。"
    raise NotImplementedError(task)
