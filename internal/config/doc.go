// SPDX-License-Identifier: Apache-2.0

// Package config reads the configuration of the node agent: one YAML file, checked as a whole before any of it counts.
//
// It is strict. An unknown key, a wrong type, a name given twice or settings that contradict each other are refused, all
// of them at once, each with file, line and key. It looks at the text alone: whether a unit, a namespace or a certificate
// exists is for those to say who use it. It watches no file and applies nothing.
//
//	c, err := config.Load("/etc/ebb/agent.yaml")
//	if err != nil {
//		return err // "agent.yaml:7: services[0].grase: unknown key: did you mean \"grace\"?", one line for each thing
//	}
//	…
//	next, err := config.Load("/etc/ebb/agent.yaml") // on SIGHUP; on an error c stays in force
//	…
//	ch := config.Diff(c, next)
//	for _, name := range ch.Services.Changed {
//		…
//	}
package config
