"""Texts that quantizers go by where none are given: prose, dialogue, code, data, other languages.

What matters is which inputs of a matrix are large, and that hardly depends on what a text says.
Whoever knows what the device will be asked calibrates on that instead.
"""

from __future__ import annotations

TEXTS: tuple[str, ...] = (
    "The ferry left the mainland a little after six, when the fog was still lying on the water. "
    "There were nine of us on board: two fishermen, a teacher with a box of books, a family with "
    "three children, and a man in a grey coat who did not speak. Halfway across, the engine "
    "stopped. Nobody was worried at first. The captain went down, came up again with black hands, "
    "and asked whether anyone had a piece of wire. The teacher gave him the spiral of an exercise "
    "book. Ten minutes later we were moving, and the children had counted forty gulls.",
    "Bread needs only flour, water, salt and time. Mix five hundred grams of flour with three "
    "hundred and fifty grams of water and leave it for half an hour; this lets the flour take up "
    "the water before the salt tightens the dough. Add ten grams of salt and a spoonful of sour "
    "starter. Fold the dough every thirty minutes, four times, then let it rest in a cool place "
    "overnight. In the morning shape it, let it rise once more, and bake it in a closed pot at "
    "two hundred and forty degrees. Take the lid off after twenty-five minutes.",
    'def merge(left, right):\n    """Merge two sorted lists into one."""\n    merged = []\n'
    "    i = j = 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n"
    "            merged.append(left[i])\n            i += 1\n        else:\n"
    "            merged.append(right[j])\n            j += 1\n    merged.extend(left[i:])\n"
    "    merged.extend(right[j:])\n    return merged\n\n\ndef sort(values):\n"
    "    if len(values) < 2:\n        return values\n    middle = len(values) // 2\n"
    "    return merge(sort(values[:middle]), sort(values[middle:]))\n",
    "#include <stdio.h>\n\nint main(int argc, char **argv) {\n    long total = 0;\n    int c;\n"
    "    while ((c = getchar()) != EOF) {\n        if (c == '\\n') {\n            total += 1;\n"
    '        }\n    }\n    printf("%ld lines\\n", total);\n    return 0;\n}\n',
    '{"order": 1841, "customer": {"name": "M. Okafor", "city": "Lagos"}, "items": '
    '[{"sku": "LMP-03", "count": 3, "price": 24.5}, {"sku": "DSK-11", "count": 1, '
    '"price": 310.0}], "paid": true, "shipped": null, "notes": "leave at the back door"}',
    "Question: A tank holds 240 litres. One pipe fills it in 6 hours and another empties it in 8 "
    "hours. How long does it take to fill the empty tank with both open?\n\nAnswer: The first pipe "
    "brings 240 / 6 = 40 litres an hour. The second takes 240 / 8 = 30 litres an hour. Together "
    "the tank gains 40 - 30 = 10 litres an hour, so it is full after 240 / 10 = 24 hours.",
    "User: My laptop does not find the printer any more since yesterday's update. What can I do?\n"
    "Assistant: Three things are worth trying, in this order. First, switch the printer off and on "
    "and check that it is in the same network as the laptop. Second, remove the printer in the "
    "settings and add it again; the update may have replaced the driver. Third, if it is listed "
    "but does not print, clear the queue: old jobs block new ones. Tell me at which step it fails, "
    "and which operating system you use.\nUser: The second one helped, thank you!\n"
    "Assistant: Glad to hear it. Keep the driver's name in mind in case it happens again.",
    "Am nächsten Morgen lag Schnee auf den Dächern, und die Stadt war so still, dass man die "
    "Glocken der kleinen Kirche bis zum Fluss hörte. Der Bäcker hatte schon um vier Uhr Licht. "
    "Wer früh kam, bekam die Brötchen noch warm, und wer spät kam, musste mit Brot vom Vortag "
    "zufrieden sein. Niemand beschwerte sich darüber; es war immer so gewesen.",
    "Le musée ouvre à dix heures. Pour voir la grande salle sans la foule, il vaut mieux arriver "
    "un mardi, prendre l'escalier de gauche et commencer par le dernier étage. Les tableaux les "
    "plus connus sont au premier, mais la lumière y est moins bonne l'après-midi.",
    "El tren de las ocho sale del andén tres. Los billetes se compran en la máquina o en la "
    "taquilla, y los niños menores de cuatro años viajan gratis. Si hay niebla, el viaje dura "
    "veinte minutos más.",
    "Photosynthesis takes place in two stages. In the light-dependent reactions, chlorophyll "
    "absorbs light and water is split: oxygen leaves, and energy is stored in ATP and NADPH. In "
    "the Calvin cycle this energy is used to fix carbon dioxide into sugars. Plants in hot, dry "
    "places close their pores by day, and some of them take up carbon dioxide at night instead, "
    "storing it as an acid. That is why a cactus can grow where grass cannot.",
    "| year | visitors | change |\n|------|----------|--------|\n| 2019 | 41,200 | +3.1% |\n"
    "| 2020 | 9,870 | -76.0% |\n| 2021 | 18,450 | +86.9% |\n| 2022 | 37,900 | +105.4% |\n"
    "| 2023 | 44,310 | +16.9% |\n\nThe table shows that the museum had more visitors in 2023 than "
    "before the pandemic, although the number of school classes has not recovered.",
    "Dear Ms Alvarez,\n\nthank you for your letter of 3 March. We have looked into the delay of "
    "your delivery. The parcel was sent on time, but the address on the label was incomplete, and "
    "it came back to our warehouse on the 11th. We have sent it again today by express, at no cost "
    "to you, and enclosed a voucher as an apology. If it has not reached you by Friday, please "
    "write to me directly.\n\nWith kind regards,\nJonas Berg\nCustomer service",
    "SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue\nFROM customers AS c\n"
    "LEFT JOIN orders AS o ON o.customer_id = c.id AND o.created_at >= '2023-01-01'\n"
    "GROUP BY c.id, c.name\nHAVING SUM(o.total) > 1000\nORDER BY revenue DESC\nLIMIT 20;\n\n"
    "-- The join keeps customers without orders; HAVING removes them again, because their sum is "
    "NULL.\n",
    "In 1854 a doctor in London marked every death from cholera on a map of Soho. The dots "
    "gathered around one pump in Broad Street. He persuaded the parish to take off its handle, and "
    "within days the outbreak faded; it had been falling already, because many people had left. "
    "His argument was not the map alone. A brewery nearby had its own well, and none of its men "
    "fell ill; a widow in Hampstead, far away, who had water from Broad Street brought to her "
    "because she liked its taste, died. Exceptions that fit are the best evidence there is.",
    "$ ls -la\ntotal 24\ndrwxr-xr-x 3 root root 4096 Jan  5 10:12 .\ndrwxr-xr-x 9 root root 4096 "
    "Jan  5 10:01 ..\n-rw-r--r-- 1 root root  812 Jan  5 10:12 config.yaml\n$ cat config.yaml\n"
    "server:\n  host: 0.0.0.0\n  port: 8080\n  workers: 4\nlogging:\n  level: info\n  file: "
    "/var/log/app.log\n$ systemctl restart app && journalctl -u app -n 3\nJan 05 10:13:07 app: "
    "listening on 0.0.0.0:8080\nJan 05 10:13:07 app: 4 workers ready\n",
)
