// Prometheus' own storage, PromQL and alerting rules over given scrapes, in the scrapes' own time. The question comes as
// JSON at standard input, and the answer goes as JSON to standard output.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"log/slog"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/tsdb"
)

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

type scrape struct {
	AtS     int64    `json:"at_s"`
	Samples []sample `json:"samples"`
}

type question struct {
	Rules       []string `json:"rules"`
	Scrapes     []scrape `json:"scrapes"`
	Expressions []string `json:"expressions"`
}

type alert struct {
	AtS         int64             `json:"at_s"`
	State       string            `json:"state"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

type found struct {
	Expression string   `json:"expression"`
	Error      string   `json:"error"`
	Samples    []sample `json:"samples"`
}

type answer struct {
	Errors []string `json:"errors"`
	Alerts []alert  `json:"alerts"`
	Found  []found  `json:"found"`
}

const lookback = 5 * time.Minute

func main() {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		log.Fatal(err)
	}
	folder, err := os.MkdirTemp("", "pdcluster-prometheus-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	given, err := answerTo(asked, folder)
	if err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(given); err != nil {
		log.Fatal(err)
	}
}

func answerTo(asked question, folder string) (answer, error) {
	quiet := slog.New(slog.DiscardHandler)
	db, err := tsdb.Open(folder, quiet, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return answer{}, err
	}
	defer db.Close()
	reader := parser.NewParser(parser.Options{})
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: quiet, MaxSamples: 50_000_000, Timeout: time.Minute, LookbackDelta: lookback, Parser: reader,
	})
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(engine, db), NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
		Context: context.Background(), Appendable: db, Queryable: db, Logger: quiet, Parser: reader,
	})
	groups, errs := manager.LoadGroups(30*time.Second, labels.EmptyLabels(), "", nil, false, asked.Rules...)
	given := answer{Errors: words(errs), Alerts: []alert{}, Found: []found{}}
	for _, one := range asked.Scrapes {
		if err := store(db, one); err != nil {
			return answer{}, err
		}
		at := time.Unix(one.AtS, 0).UTC()
		for _, group := range groups {
			group.Eval(context.Background(), at)
			for _, rule := range group.AlertingRules() {
				given.Alerts = append(given.Alerts, active(rule, one.AtS)...)
				if err := rule.LastError(); err != nil {
					given.Errors = append(given.Errors, fmt.Sprintf("%s at %d s: %v", rule.Name(), one.AtS, err))
				}
			}
		}
	}
	last := time.Unix(asked.Scrapes[len(asked.Scrapes)-1].AtS, 0).UTC()
	for _, expression := range asked.Expressions {
		given.Found = append(given.Found, evaluated(engine, db, expression, last))
	}
	return given, nil
}

func store(db *tsdb.DB, one scrape) error {
	appender := db.Appender(context.Background())
	for _, each := range one.Samples {
		value, err := strconv.ParseFloat(each.Value, 64)
		if err != nil {
			return err
		}
		if _, err := appender.Append(0, labels.FromMap(each.Labels), one.AtS*1000, value); err != nil {
			return fmt.Errorf("%v at %d s: %w", each.Labels, one.AtS, err)
		}
	}
	return appender.Commit()
}

func active(rule *rules.AlertingRule, atS int64) []alert {
	var told []alert
	for _, one := range rule.ActiveAlerts() {
		told = append(told, alert{atS, one.State.String(), one.Labels.Map(), one.Annotations.Map()})
	}
	return told
}

func evaluated(engine *promql.Engine, db *tsdb.DB, expression string, at time.Time) found {
	query, err := engine.NewInstantQuery(context.Background(), db, nil, expression, at)
	if err != nil {
		return found{expression, err.Error(), []sample{}}
	}
	defer query.Close()
	result := query.Exec(context.Background())
	vector, err := result.Vector()
	if err != nil {
		return found{expression, err.Error(), []sample{}}
	}
	samples := []sample{}
	for _, one := range vector {
		samples = append(samples, sample{one.Metric.Map(), number(one.F)})
	}
	return found{expression, "", samples}
}

func number(value float64) string {
	if math.IsNaN(value) {
		return "NaN"
	}
	return strconv.FormatFloat(value, 'g', -1, 64)
}

func words(errs []error) []string {
	told := []string{}
	for _, err := range errs {
		told = append(told, err.Error())
	}
	return told
}
